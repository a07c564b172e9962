"""The truth: decoding in float32 without cache, batch or speculation. Every fast path is compared with this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.noise import gumbel
from tests.sampling.reference import Filters, probabilities_of

PADDED_LENGTH = 64  # sequences are padded to multiples of this: causal attention never looks at the padding


@functools.lru_cache(maxsize=32)
def _logits_function(model: DecoderLM) -> Callable[[np.ndarray, int, int], jax.Array]:
    graph, state = nnx.split(model)

    @jax.jit
    def logits(state: nnx.State, ids: jax.Array, last: jax.Array, prompt_len: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        positions = jnp.arange(ids.shape[0])
        lengths = jnp.maximum(positions + 1, prompt_len)  # read by rotary types that depend on the length
        return model.logits(model(ids, positions, CausalAttend(), lengths)[last])

    return lambda ids, last, prompt_len: logits(state, ids, last, prompt_len)


def next_token_logits(model: DecoderLM, ids: Sequence[int], prompt_len: int | None = None) -> np.ndarray:
    """float32 [vocab]: logits of the token after `ids`, of which `prompt_len` (default: all) are the prompt."""
    padded = np.zeros(-(-len(ids) // PADDED_LENGTH) * PADDED_LENGTH, np.int32)
    padded[: len(ids)] = ids
    # Longrope has one choice of factors for a whole sequence: with every token all are computed as of its length.
    if prompt_len is None or model.config.rope.turning_length is not None:
        prompt_len = len(ids)
    return np.asarray(_logits_function(model)(padded, len(ids) - 1, prompt_len))


def greedy_tokens(model: DecoderLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` most likely tokens after `prompt`, one at a time."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(next_token_logits(model, ids, len(prompt)).argmax()))
    return ids[len(prompt) :]


def sampled_tokens(
    model: DecoderLM, prompt: Sequence[int], num_tokens: int, filters: Filters, request_key: tuple[int, int]
) -> list[int]:
    """`num_tokens` tokens sampled after `prompt`: each the argmax of perturbed logits over what the filters keep."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = next_token_logits(model, ids, len(prompt))
        noise = gumbel(jnp.asarray(request_key, jnp.uint32), jnp.int32(len(ids)), jnp.arange(len(logits)))
        scores = logits + np.float32(filters.temperature) * np.asarray(noise)
        ids.append(int(np.where(probabilities_of(logits, filters) > 0, scores, -np.inf).argmax()))
    return ids[len(prompt) :]

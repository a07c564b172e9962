"""The output of a constrained request by a plain loop: draw and, where the grammar refuses, draw again with a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.sampler import SamplingBatch, sample
from jaxinfer.scheduling.request import Request
from tests.oracle import next_token_logits
from tests.sampling.reference import adjusted


def constrained_output(model: DecoderLM, request: Request, redrawn: list[int] | None = None) -> tuple[list[int], str]:
    """The tokens of a request, and why it ends.

    Args:
        redrawn: gets the numbers of tokens that are drawn again.
    """
    params, guard = request.sampling_params, request.guard
    assert guard is not None
    state, output = guard.start, []
    while len(output) < request.max_total_tokens - request.num_prompt_tokens:
        end, forced = guard.ends(state), guard.forced(state)
        if end is not None:
            return [*output, end], "stop"
        logits = next_token_logits(model, [*request.prompt_token_ids, *output], request.num_prompt_tokens)
        biases = {token: -np.inf for token in request.ending_token_ids} if len(output) < params.min_tokens else {}
        biases |= {sequence[0]: -np.inf for sequence in request.bad_token_ids if len(sequence) == 1}
        held = adjusted(
            logits, prompt=request.prompt_token_ids, output=output, allowed=params.allowed_token_ids,
            biases={**(params.logit_bias or {}), **biases}, presence=params.presence_penalty,
            frequency=params.frequency_penalty, repetition=params.repetition_penalty,
        )  # fmt: skip
        token = forced if forced is not None else _drawn(held, request, len(output))
        if guard.advance(state, token) is None:
            mask = guard.mask(state, len(held))
            assert mask is not None
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(held)].astype(bool)
            token = _drawn(np.where(bits, held, -np.inf), request, len(output))
            if token < 0:
                return output, "error"
            if redrawn is not None:
                redrawn.append(len(output))
        following = guard.advance(state, token)
        assert following is not None
        state = following
        output.append(token)
        if guard.is_end(token) or (token in request.ending_token_ids and len(output) > params.min_tokens):
            return output, "stop"
    return output, "length"


@jax.jit
def _sampled(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    return sample(logits, sampling)


def _drawn(logits: np.ndarray, request: Request, count: int) -> int:
    params = request.sampling_params
    sampling = SamplingBatch(
        jnp.float32([params.temperature]), jnp.int32([max(params.top_k, 0)]), jnp.float32([params.top_p]),
        jnp.float32([params.min_p]), jnp.uint32([request.request_key]), jnp.int32([request.num_prompt_tokens + count]),
    )  # fmt: skip
    return int(_sampled(jnp.float32(logits[None]), sampling)[0])

"""Log probabilities of tokens, from a program that reads the hidden states of earlier launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.programs.program import TARGET, Device, Place
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs

# Positions whose logits are computed at a time, which takes [positions, vocabulary] in float32.
_BLOCK = 64


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Program of log probabilities; its shape is the number of (padded) hidden states, its inputs are these, the tokens
    after them, how many of them are wanted, and what their logits are divided by."""

    shapes: Sequence[int] = ()
    reads = (TARGET,)
    writes = ()

    @property
    def planned(self) -> dict[str, int]:
        return {"prompt_logprobs": max(self.shapes)}

    def describe(self, shape: int) -> str:
        return f"log probabilities of up to {shape} tokens"

    def idle(self, shape: int, place: Place) -> tuple[Any, ...]:
        embedding = place.model.embed.embedding.get_value()
        extent = (shape, place.model.config.hidden_size)
        hidden = jax.ShapeDtypeStruct(extent, embedding.dtype, sharding=place.whole)
        return hidden, np.zeros(shape, np.int32), np.zeros((), np.int32), np.ones(shape, np.float32)

    def run(
        self,
        device: Device,
        shape: int,
        hidden: jax.Array,
        targets: jax.Array,
        num_tokens: jax.Array,
        temperature: jax.Array,
    ) -> tuple[dict[str, Any], TokenLogprobs]:
        """Return no state, and log probabilities.

        Args:
            hidden: [T, hidden].
            targets: int32 [T], the token after each.
            num_tokens: int32 [], how many of these are wanted; what those after them get is arbitrary.
            temperature: float32 [T], what the logits before each are divided by.
        """
        model = device.models[TARGET]

        def found(hidden: jax.Array, targets: jax.Array, temperature: jax.Array) -> TokenLogprobs:
            return token_logprobs(model.logits(hidden) / temperature[:, None], targets)

        each = min(_BLOCK, shape)

        def in_blocks(x: jax.Array) -> jax.Array:
            padding = ((0, -shape % each), *((0, 0),) * (x.ndim - 1))
            return jnp.pad(x, padding, mode="edge").reshape(-1, each, *x.shape[1:])

        def of_block(index: jax.Array, *block: jax.Array) -> TokenLogprobs:
            nothing = TokenLogprobs.nothing(each, vocab=model.config.vocab_size)
            return lax.cond(num_tokens > index * each, found, lambda *_: nothing, *block)

        blocks = [in_blocks(x) for x in (hidden, targets, temperature)]
        indices = jnp.arange(blocks[0].shape[0], dtype=jnp.int32)
        of_blocks = lax.map(lambda block: of_block(*block), (indices, *blocks))
        return {}, device.readable(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:shape], of_blocks))

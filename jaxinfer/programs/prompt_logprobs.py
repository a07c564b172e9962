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
# Most launches need one token of each of a few rows, and a CPU's time grows with the positions that it computes.
_FEW = 8


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Program of log probabilities; its shape is the number of (padded) hidden states, its inputs are these, the tokens
    after them, and how many of them are wanted."""

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
        return hidden, np.zeros(shape, np.int32), np.zeros((), np.int32)

    def run(
        self, device: Device, shape: int, hidden: jax.Array, targets: jax.Array, num_tokens: jax.Array
    ) -> tuple[dict[str, Any], TokenLogprobs]:
        """Return no state, and the log probabilities of the first `num_tokens`, int32 [], of `targets` int32 [T], each
        after its hidden state [T, hidden]; zeros after those."""
        model = device.models[TARGET]
        each = min(_BLOCK, shape)

        def found(hidden: jax.Array, targets: jax.Array) -> TokenLogprobs:
            return token_logprobs(model.logits(hidden), targets)

        blocks = jnp.pad(hidden, ((0, -shape % each), (0, 0))).reshape(-1, each, hidden.shape[1])
        targets = jnp.pad(targets, (0, -shape % each)).reshape(-1, each)
        few = min(_FEW, each)

        def one(index: jax.Array, hidden: jax.Array, targets: jax.Array) -> TokenLogprobs:
            def of_few() -> TokenLogprobs:
                first = found(hidden[:few], targets[:few])
                return jax.tree.map(lambda x: jnp.pad(x, ((0, each - few), *((0, 0),) * (x.ndim - 1))), first)

            def none() -> TokenLogprobs:
                like = jax.eval_shape(found, hidden, targets)
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

            left = num_tokens - index * each
            return lax.switch(
                (left > 0).astype(jnp.int32) + (left > few), [none, of_few, lambda: found(hidden, targets)]
            )

        indices = jnp.arange(blocks.shape[0], dtype=jnp.int32)
        of_blocks = lax.map(lambda block: one(*block), (indices, blocks, targets))
        return {}, device.readable(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:shape], of_blocks))

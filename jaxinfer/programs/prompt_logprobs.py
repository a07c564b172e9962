"""Log probabilities of tokens, from a program that reads the hidden states of earlier launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.programs.program import BOUNDS, TARGET, Device, Place
from jaxinfer.sampling.bounds import Bounds, masked_lists
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs

# Positions whose logits are computed at a time, which takes [positions, vocabulary] in float32.
_BLOCK = 64
# Most launches need one token of each of a few rows, and a CPU's time grows with the positions that it computes.
_FEW = 8


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Program of log probabilities; its shape is the number of (padded) hidden states, its inputs are these, the tokens
    after them, how many of them are wanted, the seats whose masks bind their lists of likely tokens, and what their
    logits are divided by."""

    shapes: Sequence[int] = ()
    reads = (TARGET,)
    writes = (BOUNDS,)

    @property
    def planned(self) -> dict[str, int]:
        return {"prompt_logprobs": max(self.shapes)}

    def describe(self, shape: int) -> str:
        return f"log probabilities of up to {shape} tokens"

    def idle(self, shape: int, place: Place) -> tuple[Any, ...]:
        embedding = place.model.embed.embedding.get_value()
        extent = (shape, place.model.config.hidden_size)
        hidden = jax.ShapeDtypeStruct(extent, embedding.dtype, sharding=place.whole)
        seats, temperatures = np.full(shape, place.num_seats, np.int32), np.ones(shape, np.float32)
        return hidden, np.zeros(shape, np.int32), np.zeros((), np.int32), seats, temperatures

    def run(
        self,
        device: Device,
        shape: int,
        hidden: jax.Array,
        targets: jax.Array,
        num_tokens: jax.Array,
        seat: jax.Array,
        temperature: jax.Array,
    ) -> tuple[dict[str, Any], TokenLogprobs]:
        """Return the bounds, unchanged, and log probabilities.

        Args:
            hidden: [T, hidden].
            targets: int32 [T], the token after each.
            num_tokens: int32 [], how many of these are wanted; those after them get zeros.
            seat: int32 [T], the seat whose mask binds the list of each; out of range: none.
            temperature: float32 [T], what the logits before each are divided by.
        """
        model = device.models[TARGET]
        each = min(_BLOCK, shape)

        bounds: Bounds = device.state[BOUNDS]

        def found(hidden: jax.Array, targets: jax.Array, seat: jax.Array, temperature: jax.Array) -> TokenLogprobs:
            logits = model.logits(hidden) / temperature[:, None]
            return token_logprobs(logits, targets, masked_lists(logits, bounds, seat))

        def in_blocks(x: jax.Array) -> jax.Array:
            padding = ((0, -shape % each), *((0, 0),) * (x.ndim - 1))
            return jnp.pad(x, padding, mode="edge").reshape(-1, each, *x.shape[1:])

        few = min(_FEW, each)

        def one(index: jax.Array, *block: jax.Array) -> TokenLogprobs:
            def of_few() -> TokenLogprobs:
                first = found(*[x[:few] for x in block])
                return jax.tree.map(lambda x: jnp.pad(x, ((0, each - few), *((0, 0),) * (x.ndim - 1))), first)

            def none() -> TokenLogprobs:
                like = jax.eval_shape(found, *block)
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

            left = num_tokens - index * each
            return lax.switch((left > 0).astype(jnp.int32) + (left > few), [none, of_few, lambda: found(*block)])

        blocks = [in_blocks(x) for x in (hidden, targets, seat, temperature)]
        indices = jnp.arange(blocks[0].shape[0], dtype=jnp.int32)
        of_blocks = lax.map(lambda block: one(*block), (indices, *blocks))
        return {BOUNDS: device.placed(bounds)}, device.readable(
            jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:shape], of_blocks)
        )

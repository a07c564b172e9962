"""Log probabilities of prompt tokens: a program behind the steps that compute prompts of those who ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxinfer.programs.program import TARGET, Device, Place
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs

# Logits are made of this many positions at a time: [positions, vocabulary] in float32 is what it costs.
_BLOCK = 64


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """The program; its shape is the number of (padded) hidden states, its inputs are these and the next tokens."""

    shapes: Sequence[int] = ()
    reads = (TARGET,)
    writes = ()

    @property
    def planned(self) -> dict[str, int]:
        return {"prompt_logprobs": max(self.shapes)}

    def describe(self, shape: int) -> str:
        return f"log probabilities of {shape} prompt tokens"

    def idle(self, shape: int, place: Place) -> tuple[Any, ...]:
        embedding = place.model.embed.embedding.get_value()
        extent = (shape, place.model.config.hidden_size)
        hidden = jax.ShapeDtypeStruct(extent, embedding.dtype, sharding=place.whole)
        return hidden, np.zeros(shape, np.int32)

    def run(
        self, device: Device, shape: int, hidden: jax.Array, targets: jax.Array
    ) -> tuple[dict[str, Any], TokenLogprobs]:
        """No state, and the log probabilities of `targets` int32 [T], each after its hidden state [T, hidden]."""
        del shape
        model = device.models[TARGET]

        def one(position: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
            return token_logprobs(model.logits(position[0][None]), position[1][None])

        found = lax.map(one, (hidden, targets), batch_size=_BLOCK)
        return {}, device.readable(jax.tree.map(lambda x: x[:, 0], found))

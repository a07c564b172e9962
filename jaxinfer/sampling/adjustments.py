"""What changes logits before they are sampled: biases, bans, allowed sets and penalties, as one list of entries."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# One int32 holds what is known of a (row, token): how often it stands in the output, and two marks.
IN_PROMPT = 1 << 24
ALLOWED = 1 << 28
_COUNT_MASK = IN_PROMPT - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustments:
    """Arrays of Q rows and N entries; every (row, token) stands at most once. Rows out of range are padding.

    The host fills them as NumPy arrays, the device reads them as JAX arrays.
    """

    row: Any  # int32 [N]
    token: Any  # int32 [N]
    bias: Any  # float32 [N], added to the logit; -inf bans
    state: Any  # int32 [N], count in the output + IN_PROMPT + ALLOWED
    restrict: Any  # int32 [Q], 1: only tokens marked ALLOWED
    presence_penalty: Any  # float32 [Q], 0 is off
    frequency_penalty: Any  # float32 [Q], 0 is off
    repetition_penalty: Any  # float32 [Q], 1 is off

    @classmethod
    def empty(cls, num_rows: int, num_entries: int) -> Adjustments:
        """Host arrays that change nothing, to be filled in."""
        shapes = {"row": num_entries, "token": num_entries, "bias": num_entries, "state": num_entries}
        floats = {"bias", "presence_penalty", "frequency_penalty", "repetition_penalty"}
        arrays = {
            f.name: np.zeros(shapes.get(f.name, num_rows), np.float32 if f.name in floats else np.int32)
            for f in fields(cls)
        }
        arrays["row"][:] = num_rows
        arrays["repetition_penalty"][:] = 1.0
        return cls(**arrays)


def adjust(logits: jax.Array, adjustments: Adjustments) -> jax.Array:
    """Logits float32 [Q, V] with the adjustments applied, in vLLM's order.

    Allowed sets, bans and biases; then the repetition penalty (Keskar et al. 2019: positive logits of tokens that stand
    in prompt or output are divided by it, negative ones multiplied), the frequency penalty (times the count in the
    output) and the presence penalty (once if the count is not 0), both as in OpenAI's documentation.
    """
    a = adjustments
    state = jnp.zeros(logits.shape, jnp.int32).at[a.row, a.token].add(a.state, mode="drop")
    logits = jnp.where((a.restrict[:, None] == 1) & (state < ALLOWED), -jnp.inf, logits)
    logits = logits.at[a.row, a.token].add(a.bias, mode="drop")
    state = jnp.where(state >= ALLOWED, state - ALLOWED, state)
    penalty = jnp.where(state > 0, a.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    count = (state & _COUNT_MASK).astype(jnp.float32)
    logits = logits - a.frequency_penalty[:, None] * count
    return logits - jnp.where(count > 0, a.presence_penalty[:, None], 0.0)

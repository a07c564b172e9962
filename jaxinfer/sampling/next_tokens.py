"""Next tokens from hidden states, with the operands of the output head in the order that is fastest on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.constraint import FREE, Constraint, allowed
from jaxinfer.sampling.greatest import first_of_greatest, greatest_of_rows
from jaxinfer.sampling.sampler import SamplingBatch, sample

# Up to so many rows a CPU is faster with the table as the left operand, which it reads in the order of memory: 8
# against 12 ms for 32 rows of 32,000 words. With more rows, the maximum over the first axis costs what the product
# gains.
TABLE_FIRST_ROWS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constrained:
    """Constraint, and the states of Q rows, while a program is traced."""

    constraint: Constraint
    state: jax.Array  # int32 [Q]

    @property
    def anyone(self) -> jax.Array:
        return jnp.any(self.state != FREE)

    def hold(self, logits: jax.Array) -> jax.Array:
        """Return logits float32 [Q, V], -inf for tokens that are not allowed."""

        def constrained(logits: jax.Array) -> jax.Array:
            return jnp.where(allowed(self.constraint, self.state), logits, -jnp.inf)

        return lax.cond(self.anyone, constrained, lambda logits: logits, logits)


def logits_and_greedy(model: DecoderLM, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits float32 [Q, vocab] of hidden states [Q, hidden], and the greatest token of each row, int32 [Q].

    Of equal logits the one with the lower token id is the greatest. A row without one has `NO_SCORE`.
    """

    def hidden_first(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(hidden)
        return logits, greatest_of_rows(logits)

    def table_first(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The maximum is taken before transposing: XLA would merge the transpose with the product, and swap operands.
        logits = model.logits_by_word(hidden)
        return logits.T, first_of_greatest(logits)

    if hidden.shape[0] > TABLE_FIRST_ROWS:
        return hidden_first(hidden)
    return lax.platform_dependent(hidden, cpu=table_first, default=hidden_first)


def next_tokens(
    model: DecoderLM,
    hidden: jax.Array,
    sampling: SamplingBatch,
    constrained: Constrained | None = None,
    bounded: Bounded | None = None,
) -> jax.Array:
    """Return the tokens int32 [Q] that `sample` takes after hidden states [Q, hidden], if logits are not needed."""

    holders = [held for held in (bounded, constrained) if held is not None]
    anyone = functools.reduce(jnp.logical_or, [held.anyone for held in holders], jnp.asarray(False))

    def any_row() -> jax.Array:
        logits, greedy = logits_and_greedy(model, hidden)
        if holders:
            logits, greedy = as_held(logits, greedy, anyone, holders)
        return sample(logits, sampling, greedy)

    # Where all rows are greedy, nothing reads the logits by rows, and XLA leaves their transpose out.
    reads_logits = jnp.any(sampling.temperature > 0) | anyone
    return lax.cond(reads_logits, any_row, lambda: logits_and_greedy(model, hidden)[1])


def as_held(
    logits: jax.Array, greedy: jax.Array, anyone: jax.Array, holders: Sequence[Bounded | Constrained]
) -> tuple[jax.Array, jax.Array]:
    """Return logits float32 [Q, V] as they are drawn from, and the greatest token of each row, given the model's.

    Args:
        anyone: bool [], whether any row is bound or constrained.
    """

    def held(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        for holder in holders:
            logits = holder.hold(logits)
        return logits, greatest_of_rows(logits)

    split = next((holder.split for holder in holders if isinstance(holder, Bounded)), lambda logits: logits)
    # Without a sharding constraint, XLA replicates on every device what passes through a condition.
    logits, greedy = lax.cond(anyone, held, lambda logits: (logits, greedy), split(logits))
    return split(logits), greedy

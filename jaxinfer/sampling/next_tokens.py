"""From hidden states to tokens, with the product of the output head in the order that the device computes fastest."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.constraint import FREE, Constraint, allowed
from jaxinfer.sampling.greatest import first_of_greatest, greatest_of_rows
from jaxinfer.sampling.sampler import SamplingBatch, sample

# Up to so many rows a CPU is faster with the table as the left operand, which it reads as it lies: 8 against 12 ms for
# 32 rows of 32,000 words. With more rows, the maximum over the first axis takes back what the product gains.
TABLE_FIRST_ROWS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constrained:
    """The states that Q rows are in, while a program is traced."""

    constraint: Constraint
    state: jax.Array  # int32 [Q]

    @property
    def anyone(self) -> jax.Array:
        return jnp.any(self.state != FREE)


def logits_and_greedy(model: DecoderLM, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits float32 [Q, vocab] of hidden states [Q, hidden], and the token of the greatest in each row, int32 [Q].

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
    model: DecoderLM, hidden: jax.Array, sampling: SamplingBatch, constrained: Constrained | None = None
) -> jax.Array:
    """Tokens int32 [Q] that `sample` takes after hidden states [Q, hidden], where nobody asks for the logits."""

    anyone = jnp.asarray(False) if constrained is None else constrained.anyone

    def any_row() -> jax.Array:
        logits, greedy = logits_and_greedy(model, hidden)
        if constrained is not None:
            logits, greedy = lax.cond(anyone, _only_allowed, lambda logits, *_: (logits, greedy), logits, constrained)
        return sample(logits, sampling, greedy)

    # Where all rows are greedy, nothing reads the logits by rows, and XLA leaves their transpose out.
    reads_logits = jnp.any(sampling.temperature > 0) | anyone
    return lax.cond(reads_logits, any_row, lambda: logits_and_greedy(model, hidden)[1])


def _only_allowed(logits: jax.Array, constrained: Constrained) -> tuple[jax.Array, jax.Array]:
    """Logits without those of tokens that are not allowed, and the token of the greatest in each row."""
    logits = jnp.where(allowed(constrained.constraint, constrained.state), logits, -jnp.inf)
    return logits, greatest_of_rows(logits)

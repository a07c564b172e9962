"""Next tokens from hidden states, with the operands of the output head in the order that is fastest on the device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.greatest import first_of_greatest, greatest_of_rows
from jaxinfer.sampling.sampler import SamplingBatch, sample

# Up to so many rows a CPU is faster with the table as the left operand, which it reads in the order of memory: 8
# against 12 ms for 32 rows of 32,000 words. With more rows, the maximum over the first axis costs what the product
# gains.
TABLE_FIRST_ROWS = 64
# Scope in programs' texts of what runs only after a mask has refused a draw.
SECOND_DRAW = "second_draw"


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
    model: DecoderLM, hidden: jax.Array, sampling: SamplingBatch, bounded: Bounded | None = None
) -> jax.Array:
    """Return the tokens int32 [Q] that `sample` takes after hidden states [Q, hidden], if logits are not needed.

    Masks have no part in it, see `redrawn`.
    """
    anyone = jnp.asarray(False) if bounded is None else bounded.anyone

    def any_row() -> jax.Array:
        logits, greedy = logits_and_greedy(model, hidden)
        if bounded is not None:
            logits, greedy = as_held(logits, greedy, bounded)
        return sample(logits, sampling, greedy)

    # Where all rows are greedy, nothing reads the logits by rows, and XLA leaves their transpose out.
    reads_logits = jnp.any(sampling.temperature > 0) | anyone
    return lax.cond(reads_logits, any_row, lambda: logits_and_greedy(model, hidden)[1])


def as_held(logits: jax.Array, greedy: jax.Array, bounded: Bounded) -> tuple[jax.Array, jax.Array]:
    """Return logits float32 [Q, V] as they are drawn from, and the greatest token of each row, given the model's."""

    def held(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = bounded.split(bounded.adjusted(logits))
        return logits, greatest_of_rows(logits)

    # Without a sharding constraint, XLA replicates on every device what passes through a condition.
    logits, greedy = lax.cond(bounded.anyone, held, lambda logits: (logits, greedy), bounded.split(logits))
    return bounded.split(logits), greedy


def redrawn(tokens: jax.Array, refused: jax.Array, draw: Callable[[], jax.Array]) -> jax.Array:
    """Return tokens int32 [Q] with those replaced that are refused, bool [Q]: that a mask does not allow.

    Such a token is drawn again, with the same noise, among those that the mask allows. If the first draw is allowed it
    stays, also where it would not be within the top-p of the allowed tokens.

    Args:
        tokens: as `sample` has drawn them, without masks.
        draw: () -> int32 [Q], the second draw. What is computed in it runs only if a token is refused.
    """
    with jax.named_scope(SECOND_DRAW):
        return lax.cond(jnp.any(refused), lambda: jnp.where(refused, draw(), tokens), lambda: tokens)


def within_masks(model: DecoderLM, hidden: jax.Array, sampling: SamplingBatch, bounded: Bounded) -> jax.Array:
    """Return the tokens int32 [Q] drawn after hidden states [Q, hidden] among those that masks allow.

    The logits are computed again: they are not kept where hardly any is read.
    """
    logits, _ = logits_and_greedy(model, hidden)
    return sample(bounded.within_masks(bounded.hold(logits)), sampling)

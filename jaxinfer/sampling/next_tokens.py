"""Next tokens from hidden states, with the operands of the output head in the order that is fastest on the device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.greatest import first_of_greatest, greatest_of_rows
from jaxinfer.sampling.logprobs import Noted
from jaxinfer.sampling.noted import Noting
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
    return noted_tokens(model, hidden, sampling, bounded, Noting(jnp.asarray(False), processed=False))[0]


def noted_tokens(
    model: DecoderLM, hidden: jax.Array, sampling: SamplingBatch, bounded: Bounded | None, noting: Noting
) -> tuple[jax.Array, Noted]:
    """Return what `next_tokens` does, and what is noted of these tokens [Q]."""
    anyone = jnp.asarray(False) if bounded is None else bounded.anyone

    def any_row() -> tuple[jax.Array, Noted]:
        logits, greedy = logits_and_greedy(model, hidden)
        held = logits
        if bounded is not None:
            held, greedy = as_held(logits, greedy, bounded)
        tokens = sample(held, sampling, greedy)
        return tokens, noting.of(logits, tokens, sampling, bounded)

    def most_likely() -> tuple[jax.Array, Noted]:
        return logits_and_greedy(model, hidden)[1], Noted.nothing(hidden.shape[0])

    # Where all rows are greedy, nothing reads the logits by rows, and XLA leaves their transpose out.
    reads_logits = jnp.any(sampling.temperature > 0) | anyone | noting.wanted
    return lax.cond(reads_logits, any_row, most_likely)


def as_held(logits: jax.Array, greedy: jax.Array, bounded: Bounded) -> tuple[jax.Array, jax.Array]:
    """Return logits float32 [Q, V] as they are drawn from, and the greatest token of each row, given the model's."""

    def held(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = bounded.split(bounded.adjusted(logits))
        return logits, greatest_of_rows(logits)

    # Without a sharding constraint, XLA replicates on every device what passes through a condition.
    logits, greedy = lax.cond(bounded.anyone, held, lambda logits: (logits, greedy), bounded.split(logits))
    return bounded.split(logits), greedy


def redrawn[T](drawn: T, refused: jax.Array, draw: Callable[[], T]) -> T:
    """Return what was drawn, arrays [Q] in a tree, with those rows replaced that are refused, bool [Q]: that a mask
    does not allow.

    Such a token is drawn again, with the same noise, among those that the mask allows. If the first draw is allowed it
    stays, also where it would not be within the top-p of the allowed tokens.

    Args:
        drawn: tokens int32 as `sample` has drawn them, without masks, and what is noted of them.
        draw: () -> the second draw. What is computed in it runs only if a token is refused.
    """
    with jax.named_scope(SECOND_DRAW):
        return lax.cond(
            jnp.any(refused),
            lambda: jax.tree.map(lambda new, old: jnp.where(refused, new, old), draw(), drawn),
            lambda: drawn,
        )


def within_masks(
    model: DecoderLM, hidden: jax.Array, sampling: SamplingBatch, bounded: Bounded, noting: Noting
) -> tuple[jax.Array, Noted]:
    """Return the tokens int32 [Q] drawn after hidden states [Q, hidden] among those that masks allow, and what is noted
    of them.

    The logits are computed again: they are not kept where hardly any is read.
    """
    logits, _ = logits_and_greedy(model, hidden)
    tokens = sample(bounded.within_masks(bounded.hold(logits)), sampling)
    return tokens, noting.of(logits, tokens, sampling, bounded)

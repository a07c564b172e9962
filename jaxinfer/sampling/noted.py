"""Log probabilities of drawn tokens, noted in the step that draws them: a float and a rank for each, and for rows that
want them, the most likely tokens in its place.

"Raw" ones are of the model's own distribution. "Processed" ones are of the distribution that the token was drawn from:
after bounds and temperature, renormalised over what min-p, top-k and top-p keep; at temperature 0, of the bounded
logits. Masks of constraints are not part of it; a token that they have forced into it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.logprobs import Likely, Noted, likely_tokens, noted_of
from jaxinfer.sampling.sampler import SamplingBatch, processed_logits

# Scope in programs' texts of what runs only where log probabilities are wanted.
NOTES = "notes_of_draws"
# Numbers of rows whose lists of likely tokens are computed at once, where these are few of all.
_FEW = (8, 64)


class Draws(NamedTuple):
    """Q draws of tokens, and what they were drawn after and by."""

    hidden: jax.Array  # [Q, hidden]
    tokens: jax.Array  # int32 [Q]
    sampling: SamplingBatch
    bounded: Bounded

    def at(self, index: jax.Array) -> Draws:
        """Return the draws at indices int32 [N]; an index out of range yields an arbitrary one."""
        bounds, own = self.bounded.bounds, self.bounded
        hidden, tokens, sampling, seat, position, path = jax.tree.map(
            lambda x: x.at[index].get(mode="clip"),
            (self.hidden, self.tokens, self.sampling, own.seat, own.position, own.path),
        )
        return Draws(hidden, tokens, sampling, Bounded(bounds, seat, position, path))


@dataclass(frozen=True)
class Noting:
    """Whether and how draws are noted, while a program is traced.

    Attributes:
        wanted: bool [].
        processed: whether log probabilities are processed.
    """

    wanted: jax.Array
    processed: bool

    def of(self, logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch, bounded: Bounded | None) -> Noted:
        """Return what is noted of tokens int32 [Q], from the model's logits float32 [Q, V]; zeros, at no cost, if
        nothing is wanted."""

        def found(logits: jax.Array, tokens: jax.Array) -> Noted:
            tokens = jnp.maximum(tokens, 0)  # a row without a token has no log probability that is read
            shown = shown_logits(logits, tokens, sampling, bounded, processed=self.processed)
            return noted_of(shown, tokens)

        with jax.named_scope(NOTES):
            return lax.cond(self.wanted, found, lambda *_: Noted.nothing(tokens.shape[0]), logits, tokens)

    def likely(self, rows: jax.Array, model: DecoderLM, drawn: Callable[[], Draws]) -> Likely:
        """Return the most likely tokens [Q, K] in place of drawn ones; zeros, at no cost, for all but `rows`.

        Args:
            rows: bool [Q].
            drawn: returns the draws. What is computed in it is computed only if a row is wanted.
        """
        count, vocab = rows.shape[0], model.config.vocab_size

        def nothing() -> Likely:
            return Likely.nothing(count, vocab=vocab)

        def of_first(most: int) -> Likely:
            (index,) = jnp.nonzero(rows, size=most, fill_value=count)
            some = drawn().at(index)
            tokens = jnp.maximum(some.tokens, 0)
            logits = model.logits(some.hidden)
            shown = shown_logits(logits, tokens, some.sampling, some.bounded, processed=self.processed)
            found = likely_tokens(shown, some.bounded.listed(shown))
            return jax.tree.map(lambda none, new: none.at[index].set(new, mode="drop"), nothing(), found)

        # Most launches want few, and the work grows with the rows that are computed. Not in a loop over blocks: a
        # conditional that has one is not recorded in a CUDA graph.
        sizes = [size for size in _FEW if 4 * size <= count] + [count]
        number = jnp.sum(rows, dtype=jnp.int32)
        way = sum((number > size).astype(jnp.int32) for size in [0, *sizes[:-1]])
        with jax.named_scope(NOTES):
            return lax.switch(way, [nothing, *(functools.partial(of_first, size) for size in sizes)])


def shown_logits(
    logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch, bounded: Bounded | None, *, processed: bool
) -> jax.Array:
    """Return logits float32 [Q, V] of the distribution whose log probabilities are shown; the drawn tokens int32 [Q]
    are kept in any case: a mask may have forced one that is cut, and rounding may cut the last one that is kept."""
    if not processed:
        return logits
    return processed_logits(logits if bounded is None else bounded.hold(logits), sampling, tokens)

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
# The most rows whose lists of likely tokens a CPU computes at a time.
_BLOCK = 8
# Numbers of rows whose lists another device computes at once, where these are at most a third of all.
_FEW = (8, 64, 512)


class Draws(NamedTuple):
    """Q draws of tokens, and what they were drawn from."""

    logits: Callable[[jax.Array], jax.Array]  # returns the model's logits float32 [N, V] at indices int32 [N] of draws
    tokens: jax.Array  # int32 [Q]
    sampling: SamplingBatch
    bounded: Bounded

    def likely(self, index: jax.Array, *, processed: bool) -> Likely:
        """Return the most likely tokens [N, K] in place of the draws at indices int32 [N]; an index out of range yields
        those of an arbitrary draw."""
        own = self.bounded
        tokens, sampling, seat, position, path = taken(
            (self.tokens, self.sampling, own.seat, own.position, own.path), index
        )
        bounded, tokens = Bounded(own.bounds, seat, position, path), jnp.maximum(tokens, 0)
        shown = shown_logits(self.logits(index), tokens, sampling, bounded, processed=processed)
        return likely_tokens(shown, bounded.listed(shown))


def taken[T](rows: T, index: jax.Array) -> T:
    """Return the rows at indices int32 [N] of arrays [Q, ...] in a tree; an index out of range yields an arbitrary
    row."""
    return jax.tree.map(lambda x: x.at[index].get(mode="clip"), rows)


def logits_after(model: DecoderLM, hidden: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return the `logits` of draws that were drawn after hidden states [Q, hidden], to be computed where they are
    read."""
    return lambda index: model.logits(taken(hidden, index))


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

    def likely(self, rows: jax.Array, drawn: Callable[[], Draws], *, vocab: int) -> Likely:
        """Return the most likely tokens [Q, K] in place of drawn ones, with zeros for all but `rows`. The cost grows
        with the number of these, in few steps.

        Args:
            rows: bool [Q].
            drawn: returns the draws. What is computed in it is computed only if a row is wanted.
            vocab: number of words.
        """

        def listed(index: jax.Array) -> Likely:
            return drawn().likely(index, processed=self.processed)

        nothing = Likely.nothing(rows.shape[0], vocab=vocab)
        with jax.named_scope(NOTES):
            return lax.platform_dependent(
                rows,
                cpu=functools.partial(in_blocks, listed, nothing),
                default=functools.partial(at_once, listed, nothing),
            )


def in_blocks(listed: Callable[[jax.Array], Likely], nothing: Likely, rows: jax.Array) -> Likely:
    """Return `nothing` [Q, K] with the lists of rows, bool [Q], computed block by block: a CPU maps few kernels, and
    the work grows with the number of rows.

    Args:
        listed: returns the lists [N, K] at indices int32 [N], of which those out of range are not read.
    """
    count = rows.shape[0]
    size = min(_BLOCK, count)

    def found() -> Likely:
        (indices,) = jnp.nonzero(rows, size=count + -count % size, fill_value=count)

        def block(number: jax.Array, found: Likely) -> Likely:
            index = lax.dynamic_slice_in_dim(indices, number * size, size)
            return _put(found, index, listed(index))

        return lax.fori_loop(0, -(-jnp.sum(rows, dtype=jnp.int32) // size), block, nothing)

    return lax.cond(jnp.any(rows), found, lambda: nothing)


def at_once(listed: Callable[[jax.Array], Likely], nothing: Likely, rows: jax.Array) -> Likely:
    """Return what `in_blocks` does, from one of a few sizes: a GPU asks the host about a loop of unknown length, and
    records no conditional that has one."""
    count = rows.shape[0]

    def first_rows(most: int) -> Likely:
        (index,) = jnp.nonzero(rows, size=most, fill_value=count)
        return _put(nothing, index, listed(index))

    sizes = [size for size in _FEW if 3 * size <= count] + [count]
    number = jnp.sum(rows, dtype=jnp.int32)
    way = sum((number > size).astype(jnp.int32) for size in [0, *sizes[:-1]])
    return lax.switch(way, [lambda: nothing, *(functools.partial(first_rows, size) for size in sizes)])


def _put(found: Likely, index: jax.Array, lists: Likely) -> Likely:
    return jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), found, lists)


def shown_logits(
    logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch, bounded: Bounded | None, *, processed: bool
) -> jax.Array:
    """Return logits float32 [Q, V] of the distribution whose log probabilities are shown; the drawn tokens int32 [Q]
    are kept in any case: a mask may have forced one that is cut, and rounding may cut the last one that is kept."""
    if not processed:
        return logits
    return processed_logits(logits if bounded is None else bounded.hold(logits), sampling, tokens)

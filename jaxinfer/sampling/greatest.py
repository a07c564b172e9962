"""The first of the greatest: `argmax` in the forms that devices compute fastest, which also see a row without one."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A power of two: vocabularies are multiples of such.
WORDS_PER_BLOCK = 64
# In the place of a token: the row's scores have NaN among them, or their greatest is infinite, so that nothing can be
# chosen. Where tokens land, -1 says that there is none, and this that the sequence ends with an error.
NO_SCORE = -2


def greatest_of_rows(scores: jax.Array) -> jax.Array:
    """int32 [Q]: in each row of scores [Q, V] the index of the greatest, the first of several, or `NO_SCORE`."""
    return lax.platform_dependent(scores, cpu=_of_rows_on_cpu, default=_of_rows_elsewhere)


def _of_rows_on_cpu(scores: jax.Array) -> jax.Array:
    # In two passes that a CPU makes with vectors, where `argmax` goes from word to word: over what the maximum is
    # compared with, it would compute the scores again. The first may overlook NaN, the second does not.
    scores = lax.optimization_barrier(scores)
    vocab = scores.shape[-1]
    size = math.gcd(vocab, WORDS_PER_BLOCK)
    blocks = scores.reshape(scores.shape[0], vocab // size, size)
    top = lax.optimization_barrier(jnp.max(jnp.max(blocks, axis=1), axis=1))
    index = jnp.where(scores >= top[:, None], lax.broadcasted_iota(jnp.int32, scores.shape, 1), vocab)
    first = jnp.min(jnp.where(jnp.isnan(scores), NO_SCORE, index), axis=1)
    return jnp.where(jnp.isfinite(top), first, NO_SCORE)


def _of_rows_elsewhere(scores: jax.Array) -> jax.Array:
    # `argmax`, which has the greatest beside its index, but does not give it.
    def greater(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (score, index), (other_score, other_index) = one, other
        wins = (score > other_score) | jnp.isnan(score)
        comes_first = wins | ((score == other_score) & (index < other_index))
        return jnp.where(wins, score, other_score), jnp.where(comes_first, index, other_index)

    index = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    top, first = lax.reduce((scores, index), (np.array(-np.inf, scores.dtype), np.int32(0)), greater, (1,))
    return jnp.where(jnp.isfinite(top), first, NO_SCORE)


def first_of_greatest(logits: jax.Array) -> jax.Array:
    """int32 [Q]: in each column of logits [vocab, Q] the index of the greatest, the first of several, or `NO_SCORE`.

    That is `argmax` along the first axis, in one pass over the logits that a CPU makes with vectors: the greatest of
    each block of words, the first block that has the column's greatest, and its place in there.
    """
    vocab, columns = logits.shape
    size = math.gcd(vocab, WORDS_PER_BLOCK)
    blocks = logits.reshape(vocab // size, size, columns)
    tops = _greatest_or_nan(blocks, axis=1)
    # XLA would write the maximum as many times as there are blocks, to compare with.
    top = lax.optimization_barrier(_greatest_or_nan(tops, axis=0))
    block = _first(tops >= top, axis=0)
    words = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    return jnp.where(jnp.isfinite(top), block * size + _first(words >= top, axis=0), NO_SCORE)


def _greatest_or_nan(scores: jax.Array, axis: int) -> jax.Array:
    """The maximum along `axis`, NaN where there is one: XLA's own maximum may overlook it on a CPU."""

    def greater(one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where((one >= other) | jnp.isnan(one), one, other)

    return lax.reduce(scores, np.array(-np.inf, scores.dtype), greater, (axis,))


def _first(found: jax.Array, axis: int) -> jax.Array:
    """The first index along `axis` at which `found` holds; 0 where it holds nowhere."""
    extent = found.shape[axis]
    first = jnp.min(jnp.where(found, lax.broadcasted_iota(jnp.int32, found.shape, axis), extent), axis=axis)
    return jnp.where(first < extent, first, 0)

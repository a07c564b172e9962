"""`argmax` and `top_k` in the forms that devices compute fastest. Of equal values, the first one counts as greatest."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

# A power of two: vocabularies are multiples of such.
WORDS_PER_BLOCK = 64
# XLA's kernel for a GPU finds up to so many of the greatest; for more it sorts the rows.
MOST_WITHOUT_SORT = 16
# In the place of a token: the row's scores have NaN among them, or their greatest is infinite, so that no token can be
# chosen. Where tokens land, -1 means that there is none, and NO_SCORE that the sequence ends with an error.
NO_SCORE = -2


def greatest_of_rows(scores: jax.Array) -> jax.Array:
    """Return int32 [Q]: in each row of scores [Q, V] the index of the first of the greatest, or `NO_SCORE`."""
    return lax.platform_dependent(scores, cpu=_of_rows_on_cpu, default=_of_rows_elsewhere)


def _of_rows_on_cpu(scores: jax.Array) -> jax.Array:
    # Two passes that a CPU vectorises, where `argmax` goes from word to word. Without the barrier, the second pass
    # would compute the scores again. The first pass may overlook NaN, the second does not.
    scores = lax.optimization_barrier(scores)
    vocab = scores.shape[-1]
    size = math.gcd(vocab, WORDS_PER_BLOCK)
    blocks = scores.reshape(scores.shape[0], vocab // size, size)
    top = lax.optimization_barrier(jnp.max(jnp.max(blocks, axis=1), axis=1))
    index = jnp.where(scores >= top[:, None], lax.broadcasted_iota(jnp.int32, scores.shape, 1), vocab)
    first = jnp.min(jnp.where(jnp.isnan(scores), NO_SCORE, index), axis=1)
    return jnp.where(jnp.isfinite(top), first, NO_SCORE)


def _of_rows_elsewhere(scores: jax.Array) -> jax.Array:
    first = jnp.argmax(scores, axis=-1).astype(jnp.int32)  # of a row with NaN, the first of them
    top = jnp.take_along_axis(scores, first[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(top), first, NO_SCORE)


def first_of_greatest(logits: jax.Array) -> jax.Array:
    """Return int32 [Q]: in each column of logits [vocab, Q] the index of the first of the greatest, or `NO_SCORE`.

    This is `argmax` along the first axis, vectorised on a CPU: the greatest of each block of words, the first block
    that has the column's greatest, and the index within it.
    """
    vocab, columns = logits.shape
    size = math.gcd(vocab, WORDS_PER_BLOCK)
    blocks = logits.reshape(vocab // size, size, columns)
    tops = jnp.max(blocks, axis=1)
    # Without the barrier, XLA would write the maximum once for each block, to compare with.
    top = lax.optimization_barrier(jnp.max(tops, axis=0))
    block = _first(tops >= top, axis=0)
    words = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    # The maximum may overlook NaN on a CPU. One that sees NaN would be a reduction that cannot be sharded.
    has_score = jnp.isfinite(top) & ~jnp.any(jnp.isnan(logits), axis=0)
    return jnp.where(has_score, block * size + _first(words >= top, axis=0), NO_SCORE)


def top_of_rows(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the `count` greatest of each row of float32 scores [Q, V] in falling order, the lower index of equal ones
    first: scores [Q, count] and int32 [Q, count], as `lax.top_k` does.

    It avoids the sort of whole rows that a GPU would run for a large `count`: a sort takes longer than `count` passes,
    and a branch that has one is not recorded in a CUDA graph.
    """

    def by_top_k(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Without barriers, what reads them may keep XLA from seeing that a few are enough: it would sort whole rows.
        # One barrier for both would read the pair whole: where several devices share a program, XLA for a CPU expects
        # that `top_k` is read by elements, and ends the process.
        values, index = map(lax.optimization_barrier, lax.top_k(scores, count))
        return values, index

    if count <= MOST_WITHOUT_SORT:
        return by_top_k(scores)
    return lax.platform_dependent(scores, cpu=by_top_k, default=lambda scores: _in_passes(scores, count))


def _in_passes(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    # Integers in the order of the floats, -inf included; taken ones become the least integer.
    left = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    places = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    taken = []
    for _ in range(count):
        taken.append(jnp.argmax(left, axis=-1).astype(jnp.int32)[:, None])
        left = jnp.where(places == taken[-1], jnp.iinfo(jnp.int32).min, left)
    index = jnp.concatenate(taken, axis=1)
    return jnp.take_along_axis(scores, index, axis=1), index


def _first(found: jax.Array, axis: int) -> jax.Array:
    """Return the first index along `axis` at which `found` holds; 0 where it holds nowhere."""
    extent = found.shape[axis]
    first = jnp.min(jnp.where(found, lax.broadcasted_iota(jnp.int32, found.shape, axis), extent), axis=axis)
    return jnp.where(first < extent, first, 0)

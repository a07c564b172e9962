"""The first of the greatest: `argmax` in the forms that devices compute fastest."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

# A power of two: vocabularies are multiples of such.
WORDS_PER_BLOCK = 64


def greatest_of_rows(scores: jax.Array) -> jax.Array:
    """int32 [Q]: in each row of scores [Q, V] the index of the greatest, the first of several.

    A row with NaN gives 0 on a CPU, and elsewhere the index of the first NaN.
    """

    def on_cpu(scores: jax.Array) -> jax.Array:
        # In two passes that a CPU makes with vectors, where `argmax` goes from word to word: over what the maximum is
        # compared with, it would compute the scores again.
        scores = lax.optimization_barrier(scores)
        vocab = scores.shape[-1]
        size = math.gcd(vocab, WORDS_PER_BLOCK)
        blocks = scores.reshape(scores.shape[0], vocab // size, size)
        top = lax.optimization_barrier(jnp.max(jnp.max(blocks, axis=1), axis=1))
        return _first(scores >= top[:, None], axis=1)

    def elsewhere(scores: jax.Array) -> jax.Array:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(scores, cpu=on_cpu, default=elsewhere)


def first_of_greatest(logits: jax.Array) -> jax.Array:
    """int32 [Q]: in each column of logits [vocab, Q] the index of the greatest, the first of several.

    That is `argmax` along the first axis, in one pass over the logits that a CPU makes with vectors: the greatest of
    each block of words, the first block that has the column's greatest, and its place in there. A column with NaN
    gives 0.
    """
    vocab, columns = logits.shape
    size = math.gcd(vocab, WORDS_PER_BLOCK)
    blocks = logits.reshape(vocab // size, size, columns)
    tops = jnp.max(blocks, axis=1)
    # XLA would write the maximum as many times as there are blocks, to compare with.
    top = lax.optimization_barrier(jnp.max(tops, axis=0))
    block = _first(tops >= top, axis=0)
    words = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    return block * size + _first(words >= top, axis=0)


def _first(found: jax.Array, axis: int) -> jax.Array:
    """The first index along `axis` at which `found` holds; 0 where it holds nowhere."""
    extent = found.shape[axis]
    first = jnp.min(jnp.where(found, lax.broadcasted_iota(jnp.int32, found.shape, axis), extent), axis=axis)
    return jnp.where(first < extent, first, 0)

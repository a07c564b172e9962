"""Tokens that a row may be sampled from: top-k and top-p over weights, without sorting the vocabulary.

Min-p has been applied to weights before: a token that it drops weighs 0, and is not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Bits of a float in [0, 1], which are ordered as the floats are, and bits that one pass finds.
_WEIGHT_BITS = 30
_DIGIT_BITS = 2

type Measure = Callable[[jax.Array], jax.Array]


def kept_of_candidates(
    weights: jax.Array, mass: jax.Array, *, top_k: jax.Array, top_p: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """Return which of each row's heaviest tokens are kept, and whether they provably include all that top-k and top-p
    keep.

    Args:
        weights: float32 [Q, N] of the N heaviest tokens, in descending order; the first weighs 1.
        mass: float32 [Q], the sum of all the row's weights.
        top_k: int32 [Q], `vocab` is off.
        top_p: float32 [Q].

    Returns:
        bool [Q, N] and bool [Q].
    """
    count = weights.shape[-1]
    rank = jnp.arange(count)
    in_top_k = rank < top_k[:, None]
    held = jnp.where(in_top_k, weights, 0.0)
    total = jnp.sum(held, axis=-1)
    wanted = top_p * jnp.where(top_k <= count, total, mass)
    before = jnp.cumsum(held, axis=-1) - held
    nucleus = (before < wanted[:, None]) | (rank == 0)
    # Top-k ends within the candidates; or it is off (the mass it keeps would be unknown) and the nucleus is full; or
    # there is nothing besides them.
    # (The last candidate is not read by its index: XLA would sort the vocabulary for that.)
    covered = (top_k <= count) | ((top_k >= vocab) & (total >= wanted)) | (count == vocab)
    covered |= jnp.min(weights, axis=-1) <= 0
    return in_top_k & nucleus & (weights > 0), covered


def kept_of_all(weights: jax.Array, *, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Return bool [Q, V]: what top-k and then top-p keep of weights float32 [Q, V] in [0, 1]; ties go to the lower
    token id.

    NaN is kept too, so that its row is found to have no score.

    Args:
        top_k: int32 [Q], V is off.
        top_p: float32 [Q], 1 is off.
    """
    cuts, all_of_them = top_k < weights.shape[-1], jnp.ones(weights.shape, bool)
    in_top_k = lax.cond(
        jnp.any(cuts), lambda: _heaviest(weights, jnp.ones_like, top_k.astype(jnp.float32)), lambda: all_of_them
    )
    held = jnp.where(in_top_k | ~cuts[:, None], weights, 0.0)
    wanted = jnp.where(top_p < 1.0, top_p * jnp.sum(held, axis=-1), jnp.inf)
    nucleus = lax.cond(
        jnp.any(top_p < 1.0), lambda: _heaviest(held, lambda weights: weights, wanted), lambda: all_of_them
    )
    return ((held > 0) & nucleus) | jnp.isnan(weights)


def _heaviest(weights: jax.Array, measure: Measure, wanted: jax.Array) -> jax.Array:
    """Return bool [Q, V]: the heaviest tokens until `measure` of them, summed, reaches `wanted` [Q]; all, if it never
    does.

    The threshold is the greatest weight w for which the tokens of weight >= w reach `wanted`. Each pass over the
    vocabulary finds one digit of its bits, the highest first. Tokens of exactly that weight are kept in the order of
    their ids until the sum is reached.
    """
    bits, amount = lax.bitcast_convert_type(weights, jnp.int32), measure(weights)
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.int32)
    last = _WEIGHT_BITS // _DIGIT_BITS - 1

    def with_digit(number: jax.Array | int, threshold: jax.Array) -> jax.Array:
        shift = _DIGIT_BITS * (last - number)
        bounds = threshold[:, None] + (digits << shift)
        sums = jnp.sum(jnp.where(bits[:, None] >= bounds[..., None], amount[:, None], 0.0), axis=-1)
        return threshold + (jnp.sum(sums >= wanted[:, None], axis=-1, dtype=jnp.int32) << shift)

    def written_out(threshold: jax.Array) -> jax.Array:
        # A GPU would ask the host for the end of a loop.
        return functools.reduce(lambda threshold, number: with_digit(number, threshold), range(last + 1), threshold)

    def in_a_loop(threshold: jax.Array) -> jax.Array:
        return lax.fori_loop(0, last + 1, with_digit, threshold)

    threshold = lax.platform_dependent(jnp.zeros(wanted.shape, jnp.int32), cpu=in_a_loop, default=written_out)
    above = bits > threshold[:, None]
    missing = wanted - jnp.sum(jnp.where(above, amount, 0.0), axis=-1)
    ties = jnp.where(bits == threshold[:, None], amount, 0.0)
    earlier = jnp.cumsum(ties, axis=-1) - ties
    return above | ((bits == threshold[:, None]) & (earlier < missing[:, None]))

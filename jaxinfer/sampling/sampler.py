"""From logits to tokens on the device: one uniform number a row, an inverted CDF, no sort of the vocabulary.

A row's token depends on its own logits, parameters, key and position alone. Rows whose kept set is proved to lie within
the `NUM_CANDIDATES` most likely tokens are sampled among those; the others find the probability at which their kept set
ends by bisection over the bits of a float.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

NUM_CANDIDATES = 64
_CDF_BLOCK = 512
_ONE_BITS = 0x3F800000  # the bit pattern of 1.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Per-row parameters as arrays. Q rows."""

    temperature: jax.Array  # float32 [Q], 0 is greedy
    top_k: jax.Array  # int32 [Q], 0 is off
    top_p: jax.Array  # float32 [Q], 1 is off
    min_p: jax.Array  # float32 [Q], 0 is off
    request_key: jax.Array  # uint32 [Q, 2]
    sample_position: jax.Array  # int32 [Q], the index in its sequence of the token that is sampled


def sample(logits: jax.Array, sampling: SamplingBatch, greedy: jax.Array | None = None) -> jax.Array:
    """Tokens int32 [Q] from logits float32 [Q, V], and, where known, the token of the greatest logit in each row.

    Order, as in Hugging Face's documentation: temperature, top-k, top-p (of what top-k kept), min-p (relative to the
    most likely token). The token that crosses top_p is kept; ties go to the lower token id.
    """
    if greedy is None:
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = sampling.temperature > 0
    return lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _sample_random(logits, sampling), greedy),
        lambda: greedy,
    )


def uniforms(request_key: jax.Array, position: jax.Array) -> jax.Array:
    """One number in [0, 1) for each row: a function of the request's key uint32 [Q, 2] and position int32 [Q] alone."""

    def one(key: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index))

    return jax.vmap(one)(request_key, position)


def _sample_random(logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    vocab = logits.shape[-1]
    # Subtract before dividing: the most likely token weighs exactly 1 however small the temperature is.
    below_top = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(below_top / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None])
    total = jnp.sum(weights, axis=-1)
    top_k = jnp.where((sampling.top_k <= 0) | (sampling.top_k >= vocab), vocab, sampling.top_k)
    u = uniforms(sampling.request_key, sampling.sample_position)
    truncated = (top_k < vocab) | (sampling.top_p < 1.0)

    count = min(NUM_CANDIDATES, vocab)
    kept_token, covered = lax.cond(
        jnp.any(truncated & (sampling.temperature > 0)),
        lambda: _from_candidates(weights, total, top_k, sampling, u, count),
        lambda: (jnp.zeros(u.shape, jnp.int32), jnp.zeros(u.shape, bool)),
    )
    use_full = ~(truncated & covered)
    full_token = lax.cond(
        jnp.any(use_full & (sampling.temperature > 0)),
        lambda: _from_vocabulary(weights, total, top_k, truncated, sampling, u),
        lambda: jnp.zeros(u.shape, jnp.int32),
    )
    return jnp.where(use_full, full_token, kept_token)


def _from_candidates(
    weights: jax.Array, total: jax.Array, top_k: jax.Array, sampling: SamplingBatch, u: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens sampled among the `count` heaviest, and whether those provably hold all that top-k and top-p keep."""
    values, tokens = lax.top_k(weights, count)
    rank = jnp.arange(count)
    mass = jnp.where(top_k <= count, jnp.sum(jnp.where(rank < top_k[:, None], values, 0.0), axis=-1), total)
    values = jnp.where(rank < top_k[:, None], values, 0.0)
    before = jnp.cumsum(values, axis=-1) - values
    wanted = sampling.top_p * mass
    in_nucleus = (before < wanted[:, None]) | (rank == 0)
    # Covered: top-k ends within the candidates, or it is off (its mass would be unknown) and the nucleus is full.
    covered = (top_k <= count) | ((top_k >= weights.shape[-1]) & (jnp.sum(values, axis=-1) >= wanted))
    covered = covered | (count == weights.shape[-1])
    kept = jnp.where(in_nucleus & (values >= sampling.min_p[:, None]), values, 0.0)
    cdf = jnp.cumsum(kept, axis=-1)
    choice = jnp.sum(cdf <= (u * cdf[:, -1])[:, None], axis=-1)
    # Rounding of u * mass up to the mass itself would fall off the end: stay on the last kept candidate.
    last = jnp.max(jnp.where(kept > 0, rank, 0), axis=-1)
    choice = jnp.minimum(choice, last)
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0].astype(jnp.int32), covered


def _from_vocabulary(
    weights: jax.Array,
    total: jax.Array,
    top_k: jax.Array,
    truncated: jax.Array,
    sampling: SamplingBatch,
    u: jax.Array,
) -> jax.Array:
    """Tokens sampled from the whole vocabulary, cut by thresholds on the weight."""

    def cut(weights: jax.Array) -> jax.Array:
        kept = _keep_heaviest(weights, lambda values: values > 0, top_k.astype(jnp.float32))
        mass = jnp.sum(kept, axis=-1)
        wanted = jnp.where(sampling.top_p < 1.0, sampling.top_p * mass, jnp.inf)
        kept = _keep_heaviest(kept, lambda values: values, wanted)
        return jnp.where(truncated[:, None], kept, weights)

    kept = lax.cond(jnp.any(truncated & (sampling.temperature > 0)), cut, lambda weights: weights, weights)
    kept = jnp.where(kept >= sampling.min_p[:, None], kept, 0.0)
    return _invert_cdf(kept, u)


def _keep_heaviest(weights: jax.Array, measure, wanted: jax.Array) -> jax.Array:
    """The heaviest tokens until `measure` of them, summed, reaches `wanted` [Q]; the rest set to 0.

    The threshold is the largest weight t for which the tokens of weight >= t reach `wanted`, found by bisection over
    float bits (weights lie in [0, 1], where the order of floats is that of their bits). Tokens of exactly that weight
    are kept in the order of their ids until the sum is reached.
    """

    def reached(bits: jax.Array) -> jax.Array:
        threshold = lax.bitcast_convert_type(bits, jnp.float32)[:, None]
        return jnp.sum(jnp.where(weights >= threshold, measure(weights), 0.0), axis=-1) >= wanted

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # reached(low) holds (or low is 0), reached(high) does not (or high is beyond 1)
        middle = low + (high - low) // 2
        ok = reached(middle)
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low = jnp.zeros(wanted.shape, jnp.int32)
    high = jnp.full(wanted.shape, _ONE_BITS + 1, jnp.int32)
    low, _ = lax.fori_loop(0, 31, halve, (low, high))
    threshold = lax.bitcast_convert_type(low, jnp.float32)[:, None]
    above = weights > threshold
    equal = weights == threshold
    missing = wanted - jnp.sum(jnp.where(above, measure(weights), 0.0), axis=-1)
    ties = jnp.where(equal, measure(weights), 0.0)
    earlier = jnp.cumsum(ties, axis=-1) - ties
    return jnp.where(above | (equal & (earlier < missing[:, None])), weights, 0.0)


def _invert_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
    """The first token whose cumulative weight exceeds u of the whole: block sums first, then inside one block."""
    rows, vocab = weights.shape
    block = min(_CDF_BLOCK, vocab)
    blocks = -(-vocab // block)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * block - vocab))).reshape(rows, blocks, block)
    sums = jnp.sum(padded, axis=-1)
    cdf = jnp.cumsum(sums, axis=-1)
    target = u * cdf[:, -1]
    index = jnp.sum(cdf <= target[:, None], axis=-1)
    # Rounding can push the target onto the total: take the last block, and there the last token, that has weight.
    index = jnp.minimum(index, jnp.max(jnp.where(sums > 0, jnp.arange(blocks), 0), axis=-1))
    before = jnp.where(index > 0, jnp.take_along_axis(cdf, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0], 0.0)
    inside = jnp.take_along_axis(padded, index[:, None, None], axis=1)[:, 0]
    inner = jnp.cumsum(inside, axis=-1)
    choice = jnp.sum(inner <= (target - before)[:, None], axis=-1)
    choice = jnp.minimum(choice, jnp.max(jnp.where(inside > 0, jnp.arange(block), 0), axis=-1))
    return (index * block + choice).astype(jnp.int32)

"""Sampling is greedy decoding of perturbed logits: the next token is the argmax of logits + temperature * noise.

The argmax is taken over the tokens that min-p, top-k and top-p keep, and `noise` is a Gumbel number for each (key,
position, token): so tokens are distributed as softmax(logits / temperature) over what is kept (the Gumbel-max trick),
temperature 0 is greedy decoding, and a row's token depends on its own logits, parameters, key and position alone.
The same logits give the same token in every way of decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.greatest import NO_SCORE, greatest_of_rows
from jaxinfer.sampling.kept import kept_of_all, kept_of_candidates
from jaxinfer.sampling.noise import gumbel

NUM_CANDIDATES = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of Q rows as arrays."""

    temperature: jax.Array  # float32 [Q], 0 is greedy
    top_k: jax.Array  # int32 [Q], 0 is off
    top_p: jax.Array  # float32 [Q], 1 is off
    min_p: jax.Array  # float32 [Q], 0 is off
    request_key: jax.Array  # uint32 [Q, 2]
    sample_position: jax.Array  # int32 [Q], the index in its sequence of the token that is sampled


def perturbed(logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch) -> jax.Array:
    """Return logits float32 [Q, N] of tokens int32 [Q or 1, N], each plus its temperature times its noise."""
    noise = gumbel(sampling.request_key[:, None], sampling.sample_position[:, None], tokens)
    return logits + sampling.temperature[:, None] * noise


def sample(logits: jax.Array, sampling: SamplingBatch, greedy: jax.Array | None = None) -> jax.Array:
    """Sample tokens int32 [Q] from logits float32 [Q, V]; `greedy`, if known, is the greatest token of each row.

    Order, as in vLLM: temperature, min-p (relative to the most likely token), top-k, top-p (of the mass that these two
    kept). The token that crosses top_p is kept; ties go to the lower token id. A row with NaN among its logits, or
    whose greatest logit is infinite, gives `NO_SCORE`.

    On a CPU, rows whose kept set is proved to be within the `NUM_CANDIDATES` most likely tokens need noise for these
    alone. The others, and all rows on a GPU, need it for every token, and where they truncate, thresholds that cut the
    vocabulary. (On a GPU the most likely tokens are found by a sort. It takes longer than the passes that find the
    thresholds, and a branch that has one is not recorded in a CUDA graph: the host would wait for every step.)
    """
    vocab = logits.shape[-1]
    top_k = jnp.where((sampling.top_k <= 0) | (sampling.top_k >= vocab), vocab, sampling.top_k)
    is_random = sampling.temperature > 0
    truncates = is_random & ((top_k < vocab) | (sampling.top_p < 1.0))

    def from_candidates() -> tuple[jax.Array, jax.Array]:
        weights, mass = _weights(logits, sampling)
        heaviest, tokens = lax.top_k(weights, min(NUM_CANDIDATES, vocab))
        kept, covered = kept_of_candidates(heaviest, mass, top_k=top_k, top_p=sampling.top_p, vocab=vocab)
        scores = perturbed(jnp.take_along_axis(logits, tokens, axis=-1), tokens, sampling)
        scores = jnp.where(kept, scores, -jnp.inf)
        best = scores == jnp.max(scores, axis=-1, keepdims=True)
        found = jnp.min(jnp.where(best & kept, tokens, vocab), axis=-1).astype(jnp.int32)
        # The mass of a row without a finite greatest logit is NaN.
        has_score = jnp.isfinite(mass) & (found < vocab)
        return jnp.where(has_score, found, NO_SCORE), covered | ~has_score

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(is_random.shape, jnp.int32), jnp.zeros(is_random.shape, bool)

    def by_candidates() -> tuple[jax.Array, jax.Array]:
        return lax.cond(jnp.any(truncates), from_candidates, nothing)

    token, settled = lax.platform_dependent(cpu=by_candidates, default=nothing)
    settled = settled & truncates

    def from_all() -> jax.Array:
        weights, _ = _weights(logits, sampling)
        cuts = truncates & ~settled
        kept = kept_of_all(weights, top_k=jnp.where(cuts, top_k, vocab), top_p=jnp.where(cuts, sampling.top_p, 1.0))
        scores = perturbed(logits, jnp.arange(vocab, dtype=jnp.int32)[None], sampling)
        return greatest_of_rows(jnp.where(kept, scores, -jnp.inf))

    def most_likely() -> jax.Array:
        return greatest_of_rows(logits) if greedy is None else greedy

    return jnp.where(settled, token, lax.cond(jnp.any(is_random & ~settled), from_all, most_likely))


def processed_logits(logits: jax.Array, sampling: SamplingBatch, drawn: jax.Array) -> jax.Array:
    """Return logits float32 [Q, V] of the distribution that `sample` draws from, given the same ones: divided by the
    temperature, and -inf for tokens that are not kept, but for those that are drawn, int32 [Q]. Greedy rows stay as
    they are."""
    vocab = logits.shape[-1]
    is_random = sampling.temperature > 0
    top_k = jnp.where(is_random & (sampling.top_k > 0) & (sampling.top_k < vocab), sampling.top_k, vocab)
    top_p = jnp.where(is_random, sampling.top_p, 1.0)
    truncates = is_random & ((top_k < vocab) | (top_p < 1.0) | (sampling.min_p > 0))

    def cut(logits: jax.Array) -> jax.Array:
        weights, _ = _weights(logits, sampling)
        kept = kept_of_all(weights, top_k=top_k, top_p=top_p)
        is_drawn = jnp.arange(vocab) == drawn[:, None]
        return jnp.where(kept | is_drawn | ~truncates[:, None], logits, -jnp.inf)

    scaled = logits / jnp.where(is_random, sampling.temperature, 1.0)[:, None]
    return lax.cond(jnp.any(truncates), lambda: jnp.where(jnp.isneginf(cut(logits)), -jnp.inf, scaled), lambda: scaled)


def _weights(logits: jax.Array, sampling: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """Return float32 [Q, V]: the probabilities at each row's temperature, relative to the greatest, 0 where less than
    min-p; and their sums [Q]."""
    # Subtract before dividing: the most likely token weighs exactly 1 however small the temperature is.
    below_top = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(below_top / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None])
    weights = jnp.where(weights < sampling.min_p[:, None], 0.0, weights)  # NaN stays
    return weights, jnp.sum(weights, axis=-1)

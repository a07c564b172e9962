"""Log probabilities of chosen and of the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.limits import MAX_LOGPROBS
from jaxinfer.sampling.greatest import top_of_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Likely:
    """The K = MAX_LOGPROBS (or vocabulary, if smaller) most likely tokens, in arrays [..., K] of any shape."""

    token: jax.Array  # int32
    logprob: jax.Array  # float32

    @classmethod
    def nothing(cls, *shape: int, vocab: int) -> Likely:
        extent = (*shape, min(MAX_LOGPROBS, vocab))
        return cls(jnp.zeros(extent, jnp.int32), jnp.zeros(extent, jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noted:
    """Log probabilities and ranks of chosen tokens, in arrays of any shape."""

    logprob: jax.Array  # float32
    rank: jax.Array  # int32, 1: it is the most likely one

    @classmethod
    def nothing(cls, *shape: int) -> Noted:
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))

    def beside(self, likely: Likely) -> TokenLogprobs:
        return TokenLogprobs(self.logprob, self.rank, likely)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of chosen tokens, in arrays of any shape, and of the most likely ones in their places."""

    logprob: jax.Array  # float32
    rank: jax.Array  # int32, 1: it is the most likely one
    likely: Likely

    @classmethod
    def nothing(cls, *shape: int, vocab: int) -> TokenLogprobs:
        return Noted.nothing(*shape).beside(Likely.nothing(*shape, vocab=vocab))


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> TokenLogprobs:
    """Return log probabilities of tokens int32 [Q], from float32 logits [Q, V]."""
    return noted_of(logits, tokens).beside(likely_tokens(logits, logits))


def noted_of(logits: jax.Array, tokens: jax.Array) -> Noted:
    """Return log probabilities and ranks of tokens int32 [Q], from float32 logits [Q, V]."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    return Noted(chosen[:, 0] - normalizer, rank)


def likely_tokens(logits: jax.Array, listed: jax.Array) -> Likely:
    """Return the most likely tokens by float32 logits [Q, V].

    Args:
        listed: the same logits, with -inf for tokens that the lists leave out.
    """
    greatest, token = top_of_rows(listed, min(MAX_LOGPROBS, logits.shape[-1]))
    return Likely(token, greatest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

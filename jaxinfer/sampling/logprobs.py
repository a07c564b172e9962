"""Log probabilities of chosen and of the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.limits import MAX_LOGPROBS
from jaxinfer.sampling.greatest import top_of_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at Q positions, and of the K = MAX_LOGPROBS (or vocabulary, if smaller) most likely tokens."""

    logprob: jax.Array  # float32 [Q], of the chosen token
    rank: jax.Array  # int32 [Q], 1: it is the most likely one
    top_token: jax.Array  # int32 [Q, K]
    top_logprob: jax.Array  # float32 [Q, K]


def token_logprobs(logits: jax.Array, tokens: jax.Array, listed: jax.Array | None = None) -> TokenLogprobs:
    """Return log probabilities of tokens int32 [Q], from float32 logits [Q, V].

    Args:
        listed: logits with -inf for tokens that the lists of likely tokens leave out; None: they leave out none.
    """
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    top_logit, top_token = top_of_rows(logits if listed is None else listed, min(MAX_LOGPROBS, logits.shape[-1]))
    return TokenLogprobs(
        logprob=chosen[:, 0] - normalizer,
        rank=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_token=top_token,
        top_logprob=top_logit - normalizer[:, None],
    )


def logprobs_if(
    wanted: jax.Array,
    logits: jax.Array,
    tokens: jax.Array,
    list_of: Callable[[jax.Array], jax.Array],
    shown_of: Callable[[jax.Array, jax.Array], jax.Array] = lambda logits, tokens: logits,
) -> TokenLogprobs:
    """Return `token_logprobs` if `wanted`, bool []; else zeros, at no cost.

    Args:
        list_of: (logits that are shown) -> those that lists of likely tokens are made of.
        shown_of: (logits, tokens) -> logits of the distribution whose log probabilities are shown.
    """

    def found(logits: jax.Array, tokens: jax.Array) -> TokenLogprobs:
        shown = shown_of(logits, tokens)
        return token_logprobs(shown, tokens, list_of(shown))

    def none(logits: jax.Array, tokens: jax.Array) -> TokenLogprobs:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(token_logprobs, logits, tokens))

    return lax.cond(wanted, found, none, logits, tokens)

"""Log probabilities of drawn tokens alone, noted in the step that draws them: a float and a rank for each.

"Raw" ones are of the model's own distribution. "Processed" ones are of the distribution that the token was drawn from:
after bounds and temperature, renormalised over what min-p, top-k and top-p keep; at temperature 0, of the bounded
logits. Masks of constraints are not part of it; a token that they have forced into it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.limits import MAX_LOGPROBS
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxinfer.sampling.sampler import SamplingBatch, processed_logits

# Scope in programs' texts of what runs only where log probabilities are wanted.
NOTES = "notes_of_draws"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noted:
    """Log probabilities and ranks of drawn tokens, in arrays of any shape."""

    logprob: jax.Array  # float32
    rank: jax.Array  # int32, 1: it is the most likely one

    @classmethod
    def nothing(cls, *shape: int) -> Noted:
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))


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
            chosen = jnp.take_along_axis(shown, tokens[:, None], axis=-1)
            normalizer = jax.nn.logsumexp(shown, axis=-1)
            rank = 1 + jnp.sum(shown > chosen, axis=-1, dtype=jnp.int32)
            return Noted(chosen[:, 0] - normalizer, rank)

        with jax.named_scope(NOTES):
            return lax.cond(self.wanted, found, lambda *_: Noted.nothing(tokens.shape[0]), logits, tokens)

    def with_lists(
        self,
        before: TokenLogprobs,
        rows: jax.Array,
        wanted: jax.Array,
        model: DecoderLM,
        hidden: jax.Array,
        tokens: jax.Array,
        sampling: SamplingBatch,
        bounded: Bounded,
    ) -> TokenLogprobs:
        """Return log probabilities with lists of likely tokens, those of `rows`, bool [Q], from this step.

        Args:
            before: [Q], of earlier steps.
            wanted: bool []; if not, nothing is computed.
            hidden, tokens: [Q, hidden] and int32 [Q], what was drawn after.
        """

        def found(hidden: jax.Array, tokens: jax.Array) -> TokenLogprobs:
            tokens = jnp.maximum(tokens, 0)
            shown = shown_logits(model.logits(hidden), tokens, sampling, bounded, processed=self.processed)
            new = token_logprobs(shown, tokens, bounded.listed(shown))
            return jax.tree.map(
                lambda now, then: jnp.where(rows.reshape(-1, *(1,) * (now.ndim - 1)), now, then), new, before
            )

        with jax.named_scope(NOTES):
            return lax.cond(wanted, found, lambda *_: before, hidden, tokens)


def no_lists(count: int, vocab: int) -> TokenLogprobs:
    """Return lists of `count` rows of which none is known."""
    most = min(MAX_LOGPROBS, vocab)
    return TokenLogprobs(
        jnp.zeros(count, jnp.float32), jnp.zeros(count, jnp.int32), jnp.zeros((count, most), jnp.int32),
        jnp.zeros((count, most), jnp.float32),
    )  # fmt: skip


def shown_logits(
    logits: jax.Array, tokens: jax.Array, sampling: SamplingBatch, bounded: Bounded | None, *, processed: bool
) -> jax.Array:
    """Return logits float32 [Q, V] of the distribution whose log probabilities are shown; the drawn tokens int32 [Q]
    are kept in any case: a mask may have forced one that is cut, and rounding may cut the last one that is kept."""
    if not processed:
        return logits
    return processed_logits(logits if bounded is None else bounded.hold(logits), sampling, tokens)

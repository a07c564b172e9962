"""Draws of a denoising round: a token for every place of its blocks, and its probability."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.diffusion.unmask import Credit, UnmaskRule
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxinfer.sampling.next_tokens import logits_and_greedy
from jaxinfer.sampling.sampler import SamplingBatch, sample

# Added per round to a key's second word, so that the rounds of a sequence draw with independent keys.
_ROUND_STEP = 0x9E3779B9


class Places(NamedTuple):
    """Blocks of B tokens in R rows."""

    start: jax.Array  # int32 [R], the position of the first token
    round: jax.Array  # int32 [R], the round's number, which selects its noise
    masked: jax.Array  # bool [R, B], places that have no token yet


class Found(NamedTuple):
    """Results of a round of R rows, for each place of their blocks."""

    tokens: jax.Array  # int32 [R, B]
    confidence: jax.Array  # float32 [R, B], probabilities of the tokens
    noted: TokenLogprobs  # [R, B]
    credits: jax.Array  # float32 [R, B, vocab], or [R, B, 0] if the rule uses none


def keeps_credits(rule: UnmaskRule) -> bool:
    """Whether the rule needs credits from earlier rounds."""
    return isinstance(rule, Credit)


def logits_without(model: DecoderLM, hidden: jax.Array, mask_token_id: int) -> jax.Array:
    """Return logits float32 [N, vocab] of hidden states [N, hidden], with the mask token at -inf."""
    logits = logits_and_greedy(model, hidden)[0]
    return jnp.where(jnp.arange(logits.shape[1]) == mask_token_id, -jnp.inf, logits)


def sample_places(places: Places, logits: jax.Array, sampling: SamplingBatch) -> jax.Array:
    """Sample a token int32 [R * B] for each place from logits float32 [R * B, vocab], with the noise of its position
    and the round, and the parameters [R] of its row."""
    return sample(logits, sampling_of_places(places, sampling))


def draw(
    places: Places,
    logits: jax.Array,
    sampling: SamplingBatch,
    rule: UnmaskRule,
    before: Found,
    wants_logprobs: jax.Array,
) -> Found:
    """Draw a token for each place with the noise of its position and the round.

    Args:
        logits: float32 [R * B, vocab].
        sampling: sampling parameters of each row, [R].
        before: results of the round before; its credits are updated, and its log probabilities kept if none are wanted.
        wants_logprobs: bool [], whether a request wants log probabilities.
    """
    rows, size = places.masked.shape
    credits, credited = credited_by(rule, before.credits, logits, places.masked)
    tokens = sample_places(places, credited, sampling)
    confidence = probability_of(tokens, credited)
    noted = lax.cond(
        wants_logprobs,
        lambda: jax.tree.map(lambda x: x.reshape(rows, size, *x.shape[1:]), token_logprobs(logits, tokens)),
        lambda: before.noted,
    )
    return Found(tokens.reshape(rows, size), confidence.reshape(rows, size), noted, credits)


def sampling_of_places(places: Places, sampling: SamplingBatch) -> SamplingBatch:
    """Return the sampling [R * B] of all places, with the noise of their positions and rounds, given that of rows."""
    size = places.masked.shape[1]
    sampling = jax.tree.map(lambda x: jnp.repeat(x, size, axis=0), sampling)
    mixed = jnp.repeat(places.round, size).astype(jnp.uint32) * jnp.uint32(_ROUND_STEP)
    return replace(
        sampling,
        request_key=sampling.request_key.at[:, 1].add(mixed),
        sample_position=(places.start[:, None] + jnp.arange(size)).reshape(-1),
    )


def credited_by(
    rule: UnmaskRule, credits: jax.Array, logits: jax.Array, masked: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the credits [R, B, vocab] after a round, and the logits [R * B, vocab] that it draws from; both unchanged
    if the rule uses no credits."""
    if not isinstance(rule, Credit):
        return credits, logits
    flat, credited = rule.credited(credits.reshape(len(logits), -1), logits, masked.reshape(-1))
    return flat.reshape(credits.shape), credited


def probability_of(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the probabilities float32 [N] of tokens int32 [N] by logits [N, vocab]."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=1))


def noted_where(changes: jax.Array, new: TokenLogprobs, old: TokenLogprobs) -> TokenLogprobs:
    """Return the log probabilities [R, B] of places, new ones where `changes` bool [R, B] is true."""
    return jax.tree.map(lambda n, o: jnp.where(changes.reshape(*changes.shape, *(1,) * (n.ndim - 2)), n, o), new, old)

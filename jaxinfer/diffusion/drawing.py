"""What a round of denoising draws: a token for every place of its blocks, and how probable it was."""

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

# Of a key's second word: rounds of one sequence draw with keys that have nothing to do with each other.
_ROUND_STEP = 0x9E3779B9


class Places(NamedTuple):
    """Blocks of B tokens in R rows."""

    start: jax.Array  # int32 [R], the position of the first token
    round: jax.Array  # int32 [R], what tells the noise of this round from that of others
    masked: jax.Array  # bool [R, B], places that have no token yet


class Found(NamedTuple):
    """What a round of R rows has drawn, for each place of their blocks."""

    tokens: jax.Array  # int32 [R, B]
    confidence: jax.Array  # float32 [R, B], their probabilities
    noted: TokenLogprobs  # [R, B]
    credits: jax.Array  # float32 [R, B, vocab], or [R, B, 0] where the rule gives none


def keeps_credits(rule: UnmaskRule) -> bool:
    """Whether rounds need to know what those before found likely."""
    return isinstance(rule, Credit)


def logits_without(model: DecoderLM, hidden: jax.Array, mask_token_id: int) -> jax.Array:
    """Logits float32 [N, vocab] of hidden states [N, hidden], in which nothing is a mask."""
    logits = logits_and_greedy(model, hidden)[0]
    return jnp.where(jnp.arange(logits.shape[1]) == mask_token_id, -jnp.inf, logits)


def draw(
    places: Places,
    logits: jax.Array,
    sampling: SamplingBatch,
    rule: UnmaskRule,
    before: Found,
    wants_logprobs: jax.Array,
) -> Found:
    """A token for each place, drawn with the noise of its position and the round.

    Args:
        logits: float32 [R * B, vocab].
        sampling: how each row is sampled, [R].
        before: what is known of the places; notes stay as they are unless somebody wants them, and credits grow.
        wants_logprobs: int32 [], 1: somebody does.
    """
    rows, size = places.masked.shape
    sampling = jax.tree.map(lambda x: jnp.repeat(x, size, axis=0), sampling)
    mixed = jnp.repeat(places.round, size).astype(jnp.uint32) * jnp.uint32(_ROUND_STEP)
    sampling = replace(
        sampling,
        request_key=sampling.request_key.at[:, 1].add(mixed),
        sample_position=(places.start[:, None] + jnp.arange(size)).reshape(-1),
    )
    credits, credited = before.credits, logits
    if isinstance(rule, Credit):
        flat = credits.reshape(rows * size, -1)
        flat, credited = rule.credited(flat, logits, places.masked.reshape(-1))
        credits = flat.reshape(credits.shape)
    tokens = sample(credited, sampling)
    chosen = jnp.take_along_axis(credited, tokens[:, None], axis=1)[:, 0]
    confidence = jnp.exp(chosen - jax.nn.logsumexp(credited, axis=1))
    noted = lax.cond(
        wants_logprobs > 0,
        lambda: jax.tree.map(lambda x: x.reshape(rows, size, *x.shape[1:]), token_logprobs(logits, tokens)),
        lambda: before.noted,
    )
    return Found(tokens.reshape(rows, size), confidence.reshape(rows, size), noted, credits)


def noted_where(changes: jax.Array, new: TokenLogprobs, old: TokenLogprobs) -> TokenLogprobs:
    """The notes [R, B] of places, new ones where bool [R, B] says so."""
    return jax.tree.map(lambda n, o: jnp.where(changes.reshape(*changes.shape, *(1,) * (n.ndim - 2)), n, o), new, old)

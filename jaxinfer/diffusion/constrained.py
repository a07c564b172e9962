"""Rounds of blocks whose output a constraint holds: the device draws, and the host commits what the constraint allows.

Unlike in `Denoise`, the host sends each row's block, and the device keeps nothing of it but the credits of a rule that
has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.diffusion.blocks import BLOCKS, Blocks
from jaxinfer.diffusion.denoise import Denoising, block_rows
from jaxinfer.diffusion.drawing import (
    Places,
    credited_by,
    keeps_credits,
    logits_without,
    probability_of,
    sampling_of_places,
)
from jaxinfer.diffusion.unmask import UnmaskRule
from jaxinfer.programs.batch_layout import BatchShape, idle_batch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import KV, TARGET, Device, Place
from jaxinfer.sampling.bounds import WORD_BITS, num_words, unpacked
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.sampling.sampler import SamplingBatch, sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConstrainedOutput:
    """Output of a round of Q rows on the device; blocks have B tokens."""

    # int32 [B, Q], the token that was drawn at each place, if the place is the leftmost masked one of its block, or the
    # rule would commit the token; else -1. NO_SCORE at a leftmost masked place: its row has failed.
    tokens: jax.Array
    was_redrawn: jax.Array  # bool [Q], whether the first draw at the leftmost masked place was not allowed
    ran: jax.Array  # bool [1, Q], whether the row took part


class DrawnBlock(NamedTuple):
    """Draws of a round of R rows."""

    tokens: jax.Array  # int32 [R, B]; see `ConstrainedOutput`
    was_redrawn: jax.Array  # bool [R]
    credits: jax.Array  # float32 [R, B, vocab], or [R, B, 0] if the rule uses none


@dataclass(frozen=True, eq=False)
class ConstrainedRound:
    """Program of one round of blocks. Its inputs are a packed batch, which has the blocks and their rounds, and the
    mask of each row's leftmost masked place, as bits uint32 [R, W]."""

    denoising: Denoising
    shapes: Sequence[BatchShape] = ()
    reads = (TARGET,)

    @property
    def writes(self) -> Sequence[str]:
        return (KV, BLOCKS) if keeps_credits(self.denoising.rule) else (KV,)

    @property
    def planned(self) -> dict[str, BatchShape]:
        return {"constrained_round": max(self.shapes, key=lambda shape: (shape.num_rows, shape.pages_per_row))}

    def describe(self, shape: BatchShape) -> str:
        return f"a round of constrained {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        packed = idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats)
        return packed.buffer, np.zeros((shape.decode_rows, num_words(place.model.config.vocab_size)), np.uint32)

    def run(
        self, device: Device, shape: BatchShape, buffer: jax.Array, masks: jax.Array
    ) -> tuple[dict[str, Any], ConstrainedOutput]:
        batch, model, kv = unpack(buffer, shape), device.models[TARGET], device.state[KV]
        how, rows, size = self.denoising, batch.decode_rows, self.denoising.block_size
        tokens, start, number = batch.block_tokens, batch.block_start[:rows], batch.block_round[:rows]
        seat = batch.row_seat[:rows]
        runs = seat >= 0
        wide = block_rows(batch, tokens, start, runs, page_size=kv.page_size, num_slots=kv.num_slots)
        kv, hidden = forward(model, kv, wide, device.backend)
        masked = runs[:, None] & (tokens == how.mask_token_id)
        state: dict[str, Any] = {}
        blocks: Blocks | None = device.state[BLOCKS] if keeps_credits(how.rule) else None
        credits = jnp.zeros((rows, size, 0), jnp.float32)
        if blocks is not None:
            credits = jnp.where((number > 0)[:, None, None], blocks.at(seat).credits, 0.0)

        def draw() -> DrawnBlock:
            logits = logits_without(model, hidden[: rows * size], how.mask_token_id)
            return draw_constrained(
                Places(start, number, masked), logits,
                jax.tree.map(lambda x: x[:rows], batch.samples.sampling), how.rule, credits, masks,
            )  # fmt: skip

        # A block whose tokens are all known has its final keys and values computed, and nothing is drawn.
        nothing = DrawnBlock(jnp.full(tokens.shape, -1, jnp.int32), jnp.zeros(rows, bool), credits)
        drawn = lax.cond(jnp.any(masked), draw, lambda: nothing)
        if blocks is not None:
            at = jnp.where(runs, seat, blocks.start.shape[0])
            state[BLOCKS] = replace(blocks, credits=blocks.credits.at[at].set(drawn.credits, mode="drop"))
        output = ConstrainedOutput(drawn.tokens.T, drawn.was_redrawn, runs[None])
        return {KV: kv, **state}, device.readable(output)


def first_masked(masked: jax.Array) -> jax.Array:
    """Return the leftmost masked place int32 [R] of blocks, given their masked places bool [R, B]; 0 if none is."""
    return jnp.argmax(masked, axis=1).astype(jnp.int32)


def draw_constrained(
    places: Places,
    logits: jax.Array,
    sampling: SamplingBatch,
    rule: UnmaskRule,
    credits: jax.Array,
    masks: jax.Array,
) -> DrawnBlock:
    """Draw a token for each place as `draw` does; at the leftmost masked place of each row, draw again with the same
    noise if the mask does not allow the token.

    The rule judges the first draws, as it would without a constraint.

    Args:
        logits: float32 [R * B, vocab].
        sampling: sampling parameters of each row, [R].
        credits: float32 [R, B, vocab], of the rounds before; [R, B, 0] if the rule uses none.
        masks: uint32 [R, W], bits of the tokens that are allowed at the leftmost masked places.
    """
    rows, size = places.masked.shape
    credits, credited = credited_by(rule, credits, logits, places.masked)
    sampling = sampling_of_places(places, sampling)
    drawn = sample(credited, sampling)
    confidence = probability_of(drawn, credited).reshape(rows, size)
    has_masks = jnp.any(places.masked, axis=1)
    first = first_masked(places.masked)
    at = jnp.arange(rows) * size + first
    token = drawn[at]
    word = jnp.take_along_axis(masks, jnp.maximum(token, 0)[:, None] // WORD_BITS, axis=1)[:, 0]
    is_allowed = (word >> (token % WORD_BITS).astype(jnp.uint32)) & 1 > 0
    refused = has_masks & (token >= 0) & ~is_allowed

    def again() -> jax.Array:
        within = jnp.where(unpacked(masks, logits.shape[-1]), credited[at], -jnp.inf)
        return jnp.where(refused, sample(within, jax.tree.map(lambda x: x[at], sampling)), token)

    token = lax.cond(jnp.any(refused), again, lambda: token)
    drawn = drawn.reshape(rows, size)
    fails = jnp.any(places.masked & (drawn == NO_SCORE), axis=1)
    token = jnp.where(fails, NO_SCORE, token)
    is_first = places.masked & (jnp.arange(size) == first[:, None])
    tokens = jnp.where(is_first, token[:, None], jnp.where(rule(confidence, places.masked), drawn, -1))
    return DrawnBlock(tokens, refused, credits)

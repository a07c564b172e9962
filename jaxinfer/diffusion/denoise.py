"""Denoising rounds in one launch: each row draws tokens for its block, commits some, and moves on to the next block.

A round is one forward pass over whole blocks, whose tokens see each other and everything before. It draws a token for
every place and commits those that a rule chooses among the masked ones. The keys and values of a block are right once
they were computed from its final tokens: the round that finds no mask has done that, and lands the block. The keys and
values of a sequence's last block are never read: it lands as soon as all tokens up to the end are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.diffusion.blocks import BLOCKS, Blocks
from jaxinfer.diffusion.drawing import Found, Places, draw, logits_without, noted_where
from jaxinfer.diffusion.rounds import DenoiseOutput, DenoisingProgram
from jaxinfer.diffusion.unmask import UnmaskRule
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import KV, TARGET, Device
from jaxinfer.programs.wide_rows import put_tokens, wide_rows
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Denoising:
    """Settings of denoising.

    Attributes:
        block_size: tokens of a block.
        mask_token_id: placeholder of a token that is not known yet; it is never drawn.
        rule: chooses the tokens that a round commits.
        edit_threshold: a committed token is replaced if another one is drawn in its place with more than this
            probability; None: never.
        max_post_edit_steps: most rounds of a block that replace tokens after its last mask is gone.
        early_stop: nothing is generated after a block with an ending token.
    """

    block_size: int
    mask_token_id: int
    rule: UnmaskRule
    edit_threshold: float | None = None
    max_post_edit_steps: int = 16
    early_stop: bool = True


class AfterRound(NamedTuple):
    """Results of a round for R rows."""

    blocks: Blocks  # for the next round; the next block, in rows whose block has landed
    tokens: jax.Array  # int32 [R, B], the blocks after this round, masks included
    noted: TokenLogprobs  # [R, B], log probabilities of these
    landed: jax.Array  # int32 [R, B], landed tokens, then -1; NO_SCORE first in a failed row
    lands: jax.Array  # bool [R], whether the row's block landed


@dataclass(frozen=True, eq=False)
class Denoise(DenoisingProgram):
    """Program of denoising rounds over blocks; tokens see their own block and everything before it."""

    denoising: Denoising
    max_rounds: int
    shapes: Sequence[BatchShape] = ()
    writes = (KV, BLOCKS)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], DenoiseOutput]:
        batch, model = unpack(buffer, shape), device.models[TARGET]
        output = denoise_loop(
            model, device.state[KV], device.state[BLOCKS], batch, self.denoising,
            lambda kv, wide: forward(model, kv, wide, device.backend),
            max_rounds=self.rounds_in(shape),
        )  # fmt: skip
        kv, blocks, found = output
        return {KV: kv, BLOCKS: blocks}, device.readable(found)


type Forward = Callable[[KVPool, StepBatch], tuple[KVPool, jax.Array]]


def denoise_loop(
    model: DecoderLM,
    kv: KVPool,
    blocks: Blocks,
    batch: StepBatch,
    denoising: Denoising,
    forward: Forward,
    *,
    max_rounds: int,
) -> tuple[KVPool, Blocks, DenoiseOutput]:
    """Run `batch.num_steps` rounds of each row; once all rows have ended or have no room left, the rest are no-ops.

    Args:
        batch: decode rows, one for each running sequence, and chunks of prompts.
        forward: the model over a batch and the pool.
        max_rounds: most rounds that the compiled program can run.
    """
    size, rows, queries = denoising.block_size, batch.decode_rows, batch.samples.seat.shape[0]
    seat = batch.row_seat[:rows]
    first = _entered(blocks.at(seat), batch, denoising)
    num_slots = kv.num_slots

    def turn(index: jax.Array, carried: tuple[KVPool, Blocks, DenoiseOutput]) -> Any:
        kv, own, output = carried
        runs = (seat >= 0) & ~own.ended & (own.start + size <= batch.capacity[:rows]) & (index < batch.num_steps[:rows])
        wide = block_rows(batch, own.tokens, own.start, runs, page_size=kv.page_size, num_slots=num_slots)

        def run(kv: KVPool, own: Blocks) -> tuple[KVPool, AfterRound]:
            kv, hidden = forward(kv, wide)
            return kv, _after_round(model, own, runs, hidden[: rows * size], batch, denoising)

        def rest(kv: KVPool, own: Blocks) -> tuple[KVPool, AfterRound]:
            nothing = jnp.full((rows, size), -1, jnp.int32)
            return kv, AfterRound(own, own.tokens, own.noted, nothing, jnp.zeros(rows, bool))

        # Chunks of prompts are computed even if no decode row runs.
        anyone = jnp.any(runs) | (batch.token_ids.shape[0] > rows)
        kv, after = lax.cond(anyone, run, rest, kv, own)

        def noted(all_rounds: jax.Array, this_round: jax.Array, axis: int = 0) -> jax.Array:
            this_round = jnp.pad(this_round, ((0, queries - rows), *((0, 0),) * (this_round.ndim - 1)))
            return lax.dynamic_update_index_in_dim(all_rounds, this_round, index, axis=axis)

        def of_tokens(all_rounds: jax.Array, this_round: jax.Array, padding: int = 0) -> jax.Array:
            pad = ((0, queries - rows), *((0, 0),) * (this_round.ndim - 1))
            return put_tokens(all_rounds, jnp.pad(this_round, pad, constant_values=padding), index)

        logprobs = jax.tree.map(lambda x: _after_given(x, own.num_given), after.noted)
        return (
            kv,
            after.blocks,
            DenoiseOutput(
                tokens=of_tokens(output.tokens, after.landed, -1),
                ran=noted(output.ran, runs),
                blocks=noted(output.blocks, after.tokens),
                start=noted(output.start, own.start),
                logprobs=jax.tree.map(of_tokens, output.logprobs, logprobs),
            ),
        )

    output = DenoiseOutput.empty(max_rounds, queries, size, model.config.vocab_size)
    kv, own, output = lax.fori_loop(0, max_rounds, turn, (kv, first, output))
    return kv, blocks.put(seat, seat >= 0, own), output


def _entered(seated: Blocks, batch: StepBatch, denoising: Denoising) -> Blocks:
    """Return each row's entry: the one in its seat, or a new one where the row enters its seat."""
    given = batch.block_tokens
    start = batch.block_start[: batch.decode_rows]
    enters = start >= 0
    zero = jnp.zeros_like(seated.start)
    new = replace(
        seated,
        tokens=given,
        start=start,
        num_given=jnp.sum(given != denoising.mask_token_id, axis=1, dtype=jnp.int32),
        round=zero,
        num_edits=zero,
        ended=jnp.zeros_like(seated.ended),
        credits=jnp.zeros_like(seated.credits),
    )
    return jax.tree.map(lambda own, old: jnp.where(enters.reshape(-1, *(1,) * (own.ndim - 1)), own, old), new, seated)


def block_rows(
    batch: StepBatch, tokens: jax.Array, start: jax.Array, runs: jax.Array, *, page_size: int, num_slots: int
) -> StepBatch:
    """Return the batch with each row's block, whose tokens see all of it and everything before.

    Args:
        tokens: int32 [R, B], masks included.
        start: int32 [R], the position of the block's first token.
        runs: bool [R], whether the row takes part.
        page_size, num_slots: of the pool.
    """
    rows, size = tokens.shape
    wide = wide_rows(batch, tokens, start, jnp.where(runs, size, 0), page_size=page_size, num_slots=num_slots)
    last = jnp.where(runs, start + size - 1, -1)
    return replace(wide, limit=wide.limit.at[: rows * size].set(jnp.repeat(last, size)))


def _after_round(
    model: DecoderLM, own: Blocks, runs: jax.Array, hidden: jax.Array, batch: StepBatch, denoising: Denoising
) -> AfterRound:
    """Return the results of a round from its hidden states [R * B, hidden]."""
    size, place = own.tokens.shape[1], jnp.arange(own.tokens.shape[1])
    masked = own.tokens == denoising.mask_token_id
    had_masks = jnp.any(masked, axis=1)
    may_edit = jnp.zeros_like(had_masks)
    if denoising.edit_threshold is not None:
        may_edit = runs & (had_masks | (own.num_edits < denoising.max_post_edit_steps))
    draws = runs & (had_masks | may_edit)
    before = Found(own.tokens, jnp.zeros(own.tokens.shape, jnp.float32), own.noted, own.credits)
    found = lax.cond(
        jnp.any(draws),
        lambda: draw(
            Places(own.start, own.round, masked), logits_without(model, hidden, denoising.mask_token_id),
            jax.tree.map(lambda x: x[: len(masked)], batch.samples.sampling), denoising.rule, before,
            batch.wants_logprobs > 0,
        ),
        lambda: before,
    )  # fmt: skip
    # If nothing can be drawn in place of a mask, its row ends as it is.
    fails = runs & jnp.any(masked & (found.tokens == NO_SCORE), axis=1)
    runs &= ~fails
    changes = denoising.rule(found.confidence, masked) & (runs & had_masks)[:, None]
    edits = jnp.zeros_like(changes)
    if denoising.edit_threshold is not None:
        edits = may_edit[:, None] & ~masked & (place >= own.num_given[:, None])
        edits &= (found.tokens != own.tokens) & (found.confidence > denoising.edit_threshold)
    changes |= edits
    tokens = jnp.where(changes, found.tokens, own.tokens)
    lands = runs & ~had_masks & ~jnp.any(edits, axis=1)
    last, ends = _end_of(tokens, own, batch, denoising)
    if denoising.edit_threshold is None:
        # No token changes any more, and a reader of the block's keys and values would need all of its tokens.
        is_whole = jnp.all((tokens != denoising.mask_token_id) | (place > last[:, None]), axis=1)
        lands |= runs & (last < size - 1) & is_whole
    there = place + own.num_given[:, None] <= last[:, None]
    landed = jnp.where(lands[:, None] & there, _after_given(tokens, own.num_given), -1)
    landed = landed.at[:, 0].set(jnp.where(fails, NO_SCORE, landed[:, 0]))

    def unless_landed(now: jax.Array, of_next_block: jax.Array | float) -> jax.Array:
        return jnp.where(lands.reshape(-1, *(1,) * (now.ndim - 1)), of_next_block, now)

    noted = noted_where(changes, found.noted, own.noted)
    blocks = Blocks(
        tokens=unless_landed(tokens, denoising.mask_token_id),
        start=unless_landed(own.start, own.start + size),
        num_given=unless_landed(own.num_given, 0),
        round=unless_landed(own.round + runs, 0),
        num_edits=unless_landed(own.num_edits + (runs & ~had_masks), 0),
        ended=own.ended | (lands & ends) | fails,
        noted=noted,
        credits=unless_landed(jnp.where(runs[:, None, None], found.credits, own.credits), 0.0),
    )
    return AfterRound(blocks, tokens, noted, landed, lands)


def _end_of(tokens: jax.Array, own: Blocks, batch: StepBatch, denoising: Denoising) -> tuple[jax.Array, jax.Array]:
    """Return the last place int32 [R] of each block [R, B] that belongs to its sequence, and whether the sequence ends
    with it, bool [R], judging by the present tokens: a mask before it may yet become an earlier end."""
    rows, size = tokens.shape
    place = jnp.arange(size)
    last = batch.samples.max_len[:rows] - 1 - own.start
    ends = last < size
    last = jnp.minimum(last, size - 1)
    if denoising.early_stop:
        is_ending = jnp.any(tokens[:, :, None] == batch.samples.ending_token_ids[:rows, None], axis=2)
        is_end = is_ending & (place >= own.num_given[:, None]) & (place <= last[:, None])
        found = jnp.any(is_end, axis=1)
        last = jnp.where(found, jnp.argmax(is_end, axis=1), last)
        ends |= found
    return last, ends


def _after_given(per_place: jax.Array, num_given: jax.Array) -> jax.Array:
    """Shift [R, B, ...] so that it starts after the given tokens; the entries after the last are arbitrary."""
    place = jnp.minimum(jnp.arange(per_place.shape[1]) + num_given[:, None], per_place.shape[1] - 1)
    return jnp.take_along_axis(per_place, place.reshape(*place.shape, *(1,) * (per_place.ndim - 2)), axis=1)

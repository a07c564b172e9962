"""Rounds of denoising in one launch: each row draws tokens for its block, commits some, and goes on to the next block.

A round is one forward over whole blocks, whose tokens see each other and everything before. It draws a token for every
place and commits those that a rule chooses among the masked ones. The keys and values of a block are right once they
were computed from its final tokens: the round that finds no mask has done that, and lands the block. Nobody reads those
of a block in which its sequence ends: it lands as soon as all tokens up to the end are there.
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
from jaxinfer.programs.wide_rows import wide_rows
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Denoising:
    """How blocks are denoised.

    Attributes:
        block_size: tokens of a block.
        mask_token_id: what stands where no token is yet; it is never drawn.
        rule: which tokens a round commits.
        edit_threshold: a committed token is replaced by another one that is drawn in its place with more than this
            probability; None: never.
        max_post_edit_steps: rounds of a block that replace tokens where none is masked any more, at most.
        early_stop: nothing is generated behind a block with an ending token.
    """

    block_size: int
    mask_token_id: int
    rule: UnmaskRule
    edit_threshold: float | None = None
    max_post_edit_steps: int = 16
    early_stop: bool = True


class AfterRound(NamedTuple):
    """What a round of R rows leaves."""

    blocks: Blocks  # for the next round: of rows whose block has landed, the next block
    tokens: jax.Array  # int32 [R, B], of the round's own blocks, masks included
    noted: TokenLogprobs  # [R, B], of these
    landed: jax.Array  # int32 [R, B], what landed, -1 behind it; or NO_SCORE alone
    lands: jax.Array  # bool [R]


@dataclass(frozen=True, eq=False)
class Denoise(DenoisingProgram):
    """Rounds of blocks, each of which its tokens see and what is before it."""

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
    """As many rounds of each row as `batch.num_steps` says; nothing is done once all have ended or have no room left.

    Args:
        batch: decode rows, one for each running sequence, and chunks of prompts.
        forward: the model over a batch and the pool.
        max_rounds: the most that the compiled program can run.
    """
    size, rows, queries = denoising.block_size, batch.decode_rows, batch.samples.seat.shape[0]
    seat = batch.row_seat[:rows]
    first = _entered(blocks.at(seat), batch, denoising)
    num_slots = kv.num_slots

    def turn(index: jax.Array, carried: tuple[KVPool, Blocks, DenoiseOutput]) -> Any:
        kv, own, output = carried
        runs = (seat >= 0) & ~own.ended & (own.start + size <= batch.capacity[:rows]) & (index < batch.num_steps[:rows])
        wide = _block_rows(batch, own, runs, page_size=kv.page_size, num_slots=num_slots)

        def run(kv: KVPool, own: Blocks) -> tuple[KVPool, AfterRound]:
            kv, hidden = forward(kv, wide)
            return kv, _after_round(model, own, runs, hidden[: rows * size], batch, denoising)

        def rest(kv: KVPool, own: Blocks) -> tuple[KVPool, AfterRound]:
            nothing = jnp.full((rows, size), -1, jnp.int32)
            return kv, AfterRound(own, own.tokens, own.noted, nothing, jnp.zeros(rows, bool))

        # Prompts want to be computed whoever else there is.
        anyone = jnp.any(runs) | (batch.token_ids.shape[0] > rows)
        kv, after = lax.cond(anyone, run, rest, kv, own)

        def noted(all_rounds: jax.Array, of_this: jax.Array, axis: int = 0) -> jax.Array:
            of_this = jnp.pad(of_this, ((0, queries - rows), *((0, 0),) * (of_this.ndim - 1)))
            return lax.dynamic_update_index_in_dim(all_rounds, of_this, index, axis=axis)

        of_rows = (after.lands.reshape(-1, *(1,) * extra) for extra in (1, 1, 2, 2))
        rolled = jax.tree.map(lambda x: _behind_given(x, own.num_given), after.noted)
        kept = [
            jnp.where(mask, new, old)
            for mask, new, old in zip(of_rows, jax.tree.leaves(rolled), jax.tree.leaves(output.noted), strict=True)
        ]
        tokens = jnp.pad(after.landed, ((0, queries - rows), (0, 0)), constant_values=-1)
        return (
            kv,
            after.blocks,
            DenoiseOutput(
                tokens=lax.dynamic_update_slice_in_dim(output.tokens, tokens.T, index * size, axis=0),
                ran=noted(output.ran, runs),
                blocks=noted(output.blocks, after.tokens),
                start=noted(output.start, own.start),
                noted=jax.tree.unflatten(jax.tree.structure(output.noted), kept),
            ),
        )

    output = DenoiseOutput.empty(max_rounds, queries, size, jax.tree.map(jnp.zeros_like, first.noted))
    kv, own, output = lax.fori_loop(0, max_rounds, turn, (kv, first, output))
    flat = jax.tree.map(
        lambda x: jnp.pad(x, ((0, queries - rows), *((0, 0),) * (x.ndim - 1))).reshape(-1, *x.shape[2:]), output.noted
    )
    return kv, blocks.put(seat, seat >= 0, own), replace(output, noted=flat)


def _entered(seated: Blocks, batch: StepBatch, denoising: Denoising) -> Blocks:
    """What rows have in their seats, or bring with them where they enter these."""
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


def _block_rows(batch: StepBatch, own: Blocks, runs: jax.Array, *, page_size: int, num_slots: int) -> StepBatch:
    """The batch with each row's block, whose tokens see all of it and everything before."""
    rows, size = own.tokens.shape
    wide = wide_rows(batch, own.tokens, own.start, jnp.where(runs, size, 0), page_size=page_size, num_slots=num_slots)
    last = jnp.where(runs, own.start + size - 1, -1)
    return replace(wide, limit=wide.limit.at[: rows * size].set(jnp.repeat(last, size)))


def _after_round(
    model: DecoderLM, own: Blocks, runs: jax.Array, hidden: jax.Array, batch: StepBatch, denoising: Denoising
) -> AfterRound:
    """What comes of a round whose hidden states are [R * B, hidden]."""
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
            batch.wants_logprobs,
        ),
        lambda: before,
    )  # fmt: skip
    # A row with a mask in whose place nothing can be drawn ends, as it is.
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
        # Nothing changes any more, and nobody comes to read the block's keys and values but with all of its tokens.
        is_whole = jnp.all((tokens != denoising.mask_token_id) | (place > last[:, None]), axis=1)
        lands |= runs & (last < size - 1) & is_whole
    there = place + own.num_given[:, None] <= last[:, None]
    landed = jnp.where(lands[:, None] & there, _behind_given(tokens, own.num_given), -1)
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
    """Of blocks [R, B], as far as their tokens say: int32 [R], the last place that belongs to its sequence, and bool
    [R], whether the sequence ends with it. Masks before it may yet become an earlier end."""
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


def _behind_given(of_places: jax.Array, num_given: jax.Array) -> jax.Array:
    """[R, B, ...] of a block's places, those of given tokens left out; what comes behind the last is anything."""
    place = jnp.minimum(jnp.arange(of_places.shape[1]) + num_given[:, None], of_places.shape[1] - 1)
    return jnp.take_along_axis(of_places, place.reshape(*place.shape, *(1,) * (of_places.ndim - 2)), axis=1)

"""Denoising rounds of bidirectional models: whole sequences as chunks, and windows around blocks in loops.

A round is one forward pass whose tokens see all of their sequence: for the tokens that it computes, the keys and values
of this round; for all others, those of the last time they were computed. It draws a token for every masked place of a
block and commits those that a rule chooses. A row whose block has no mask left is idle until the host brings the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.diffusion.canvas import CANVAS, Canvas
from jaxinfer.diffusion.drawing import Found, Places, draw, logits_without, noted_where
from jaxinfer.diffusion.rounds import DenoiseOutput, DenoisingProgram
from jaxinfer.diffusion.vicinity import Vicinity, expected_embeddings
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import KV, TARGET, Device
from jaxinfer.programs.wide_rows import put_tokens, wide_rows
from jaxinfer.sampling.greatest import NO_SCORE

type Forward = Callable[[KVPool, StepBatch, jax.Array | None], tuple[KVPool, jax.Array]]


@dataclass(frozen=True, eq=False)
class DenoiseCanvas(DenoisingProgram):
    """Program of rounds over windows, or of one round over windows and chunks, which see the whole sequence."""

    vicinity: Vicinity
    max_rounds: int
    shapes: Sequence[BatchShape] = ()
    writes = (KV, CANVAS)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], DenoiseOutput]:
        model = device.models[TARGET]
        kv, canvas, found = canvas_rounds(
            model, device.state[KV], device.state[CANVAS], unpack(buffer, shape), self.vicinity,
            lambda kv, wide, added: forward(model, kv, wide, device.backend, added),
            max_rounds=self.rounds_in(shape),
        )  # fmt: skip
        return {KV: kv, CANVAS: canvas}, device.readable(found)


class Rows(NamedTuple):
    """State that Q sequences of a launch carry from round to round; at most R of them are windows of W tokens."""

    windows: jax.Array  # int32 [R, W], tokens of the windows
    round: jax.Array  # int32 [Q], number of the sequence's round
    done: jax.Array  # bool [Q], whether its block has no masks left
    noted: Any  # TokenLogprobs [Q, B]
    credits: jax.Array  # float32 [Q, B, vocab or 0]


class Where(NamedTuple):
    """Places of the Q sequences of a launch, which do not change during it."""

    row: jax.Array  # int32 [Q], row of the batch
    is_window: jax.Array  # bool [Q]
    start: jax.Array  # int32 [Q], start of the block; -1: the sequence is idle
    first: jax.Array  # int32 [Q], position of a window's first token
    total: jax.Array  # int32 [Q], number of tokens of the sequence
    there: jax.Array  # bool [Q, B], places of the block that are within the sequence


def canvas_rounds(
    model: DecoderLM,
    kv: KVPool,
    canvas: Canvas,
    batch: StepBatch,
    vicinity: Vicinity,
    forward: Forward,
    *,
    max_rounds: int,
) -> tuple[KVPool, Canvas, DenoiseOutput]:
    """Run `batch.num_steps` rounds of each row; rows without masks are idle.

    Args:
        batch: decode rows, one for each window, and chunks. A chunk's block starts at its `logits_index`.
        forward: the model over a batch and the pool, with an optional addition to the embeddings of its tokens.
        max_rounds: most rounds that the compiled program can run.
    """
    size, queries = vicinity.block_size, batch.samples.seat.shape[0]
    where = _places_of(batch, vicinity, num_seats=canvas.credits.shape[0])
    seat = batch.samples.seat
    first = Rows(
        batch.block_tokens,
        batch.block_round[where.row],
        where.start < 0,
        *jax.tree.map(lambda x: x.at[seat].get(mode="clip"), (canvas.noted, canvas.credits)),
    )

    def turn(index: jax.Array, carried: tuple[KVPool, jax.Array, Rows, DenoiseOutput]) -> Any:
        kv, expected, own, output = carried
        runs = ~own.done & (index < batch.num_steps[where.row])

        def run(kv: KVPool, expected: jax.Array, own: Rows) -> Any:
            return _round(model, kv, expected, own, runs, batch, where, vicinity, forward)

        def rest(kv: KVPool, expected: jax.Array, own: Rows) -> Any:
            nothing = jnp.full((queries, size), -1, jnp.int32)
            return kv, expected, own, nothing, nothing

        kv, expected, own, tokens, landed = lax.cond(jnp.any(runs), run, rest, kv, expected, own)

        def noted(all_rounds: jax.Array, this_round: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(all_rounds, this_round, index, axis=0)

        output = replace(
            output,
            tokens=put_tokens(output.tokens, landed, index),
            ran=noted(output.ran, runs),
            blocks=noted(output.blocks, jnp.where(where.there, tokens, -1)),
            start=noted(output.start, where.start),
            logprobs=jax.tree.map(lambda every, now: put_tokens(every, now, index), output.logprobs, own.noted),
        )
        return kv, expected, own, output

    output = DenoiseOutput.empty(max_rounds, queries, size, model.config.vocab_size)
    kv, expected, own, output = lax.fori_loop(0, max_rounds, turn, (kv, canvas.expected, first, output))
    noted, credits = jax.tree.map(
        lambda old, new: old.at[seat].set(new, mode="drop"), (canvas.noted, canvas.credits), (own.noted, own.credits)
    )
    return kv, Canvas(expected, noted, credits), output


def _places_of(batch: StepBatch, vicinity: Vicinity, *, num_seats: int) -> Where:
    row = batch.row[batch.logits_index]
    start = jnp.where(batch.samples.seat < num_seats, batch.block_start[row], -1)
    total = batch.samples.max_len
    there = (start >= 0)[:, None] & (start[:, None] + jnp.arange(vicinity.block_size) < total[:, None])
    first = jnp.maximum(start - vicinity.prefix_look, 0)
    return Where(row, (row < batch.decode_rows) & (start >= 0), start, first, total, there)


def _round(
    model: DecoderLM,
    kv: KVPool,
    expected: jax.Array,
    own: Rows,
    runs: jax.Array,
    batch: StepBatch,
    where: Where,
    vicinity: Vicinity,
    forward: Forward,
) -> tuple[KVPool, jax.Array, Rows, jax.Array, jax.Array]:
    """Return the pool, the additions to embeddings and the rows after a round, its blocks int32 [Q, B], and the landed
    tokens int32 [Q, B]: -1 elsewhere and after an ending token, `NO_SCORE` at the start of a failed block."""
    wide = _with_windows(batch, own, runs, where, vicinity, page_size=kv.page_size, num_slots=kv.num_slots)
    seat_of_token, smoothing = batch.row_seat[wide.row], vicinity.smoothing
    added = None
    if smoothing is not None:
        # A sequence's first round adds nothing: the seat still holds another sequence's embeddings.
        number = _of_rows(own.round, where, batch)
        added = expected.at[seat_of_token, wide.positions].get(mode="clip")
        added = jnp.where((number > 0)[wide.row][:, None], added, 0)
    kv, hidden = forward(kv, wide, added)

    size, (rows, width) = vicinity.block_size, own.windows.shape
    more = rows * (width - 1)
    begins = jnp.where(where.is_window, where.row * width + where.start - where.first, batch.logits_index + more)
    index = jnp.clip(begins[:, None] + jnp.arange(size), 0, len(hidden) - 1)
    before = wide.token_ids[index]
    masked = (before == vicinity.mask_token_id) & where.there & runs[:, None]
    begun = jnp.any((before != vicinity.mask_token_id) & where.there, axis=1)
    known = Found(before, jnp.zeros(before.shape, jnp.float32), own.noted, _where_rows(begun, own.credits, 0.0))
    logits = logits_without(model, hidden[index.reshape(-1)], vicinity.mask_token_id)
    places = Places(where.start, own.round, masked)
    found = draw(places, logits, batch.samples.sampling, vicinity.rule, known, batch.wants_logprobs > 0)
    least = None if smoothing is None else smoothing.least_threshold(own.round)
    # If nothing can be drawn in place of a mask, its row ends as it is.
    fails = jnp.any(masked & (found.tokens == NO_SCORE), axis=1)
    changes = vicinity.rule(found.confidence, masked, least) & masked & ~fails[:, None]
    tokens = jnp.where(changes, found.tokens, before)
    done = own.done | fails | (runs & ~jnp.any((tokens == vicinity.mask_token_id) & where.there, axis=1))
    flat = wide.token_ids.at[jnp.where(changes, index, len(hidden))].set(tokens, mode="drop")

    if smoothing is not None:
        mean = expected_embeddings(model, hidden, vicinity.mask_token_id)
        weight = _of_rows(smoothing.weight(own.round), where, batch)[wide.row]
        is_mask = flat == vicinity.mask_token_id
        # Padding and idle rows change nothing.
        is_real = (wide.limit >= 0) & _of_rows(runs, where, batch)[wide.row]
        at = jnp.where(is_real, seat_of_token, len(expected))
        new = jnp.where(is_mask[:, None], weight[:, None] * mean, 0).astype(expected.dtype)
        expected = expected.at[at, wide.positions].set(new, mode="drop")

    after = Rows(
        flat[: rows * width].reshape(rows, width),
        own.round + runs,
        done,
        noted_where(changes, found.noted, own.noted),
        _where_rows(runs, found.credits, own.credits),
    )
    landed = _landed(tokens, done & ~own.done & ~fails, where, batch)
    return kv, expected, after, tokens, landed.at[:, 0].set(jnp.where(fails, NO_SCORE, landed[:, 0]))


def _landed(tokens: jax.Array, lands: jax.Array, where: Where, batch: StepBatch) -> jax.Array:
    """Return the tokens int32 [Q, B] of landed blocks, up to the first ending token; -1 elsewhere."""
    is_ending = jnp.any(tokens[:, :, None] == batch.samples.ending_token_ids[:, None], axis=2)
    before = jnp.cumsum(is_ending, axis=1) - is_ending
    return jnp.where(lands[:, None] & where.there & (before == 0), tokens, -1)


def _with_windows(
    batch: StepBatch, own: Rows, runs: jax.Array, where: Where, vicinity: Vicinity, *, page_size: int, num_slots: int
) -> StepBatch:
    """Widen the batch to the tokens of each window, which see all of their sequence."""
    rows, width = own.windows.shape
    # The first sequences are windows, each in the row of the same number; chunks follow.
    start, total, first = where.start[:rows], where.total[:rows], where.first[:rows]
    runs = runs[:rows] & where.is_window[:rows]
    count = jnp.where(runs, jnp.minimum(start + vicinity.block_size + vicinity.after_look, total) - first, 0)
    wide = wide_rows(batch, own.windows, first, count, page_size=page_size, num_slots=num_slots)
    last = jnp.repeat(total - 1, width)
    limit = wide.limit[: rows * width]
    seen = jnp.where(runs, total, 0)
    return replace(
        wide,
        limit=wide.limit.at[: rows * width].set(jnp.where(limit >= 0, last, -1)),
        **{name: getattr(wide, name).at[:rows].set(seen) for name in ("kv_len", "trunk_len", "tail_start")},
    )


def _of_rows(of_sequences: jax.Array, where: Where, batch: StepBatch) -> jax.Array:
    """Scatter values of sequences [Q] to the rows [R] of the batch; 0 for rows without a sequence."""
    rows = batch.row_seat.shape[0]
    at = jnp.where(where.start >= 0, where.row, rows)
    return jnp.zeros(rows, of_sequences.dtype).at[at].set(of_sequences, mode="drop")


def _where_rows(condition: jax.Array, new: jax.Array, old: jax.Array | float) -> jax.Array:
    return jnp.where(condition.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

"""Several decode steps in one launch, for rows that do not need the host in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, idle_batch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import BOUNDS, KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.seats import Seats, bounded_draws, count_latest, read_seats, write_seats
from jaxinfer.programs.step import padded_to
from jaxinfer.sampling.bounds import Bounds
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.sampling.next_tokens import noted_tokens, redrawn, within_masks
from jaxinfer.sampling.noted import Noted, Noting, no_lists


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopOutput:
    """Results of N decode steps of Q sequences, on the device."""

    tokens: jax.Array  # int32 [N, Q], -1 where a row was idle, NO_SCORE where it ends because nothing could be sampled
    was_redrawn: jax.Array  # bool [Q], first tokens that are not those of a draw without a mask
    # For each row's last step, if the batch wants log probabilities: hidden states [T, hidden] of the Q sequences and
    # padding, and the tokens int32 [T] that were sampled after each. Else zeros.
    hidden: jax.Array
    sampled: jax.Array
    noted: Noted  # [N, Q], of these tokens, if the batch wants that; else zeros
    lists: TokenLogprobs | None  # [Q], of each row's last one, in an engine of processed log probabilities


type _State = tuple[KVPool, Seats, Bounds, LoopOutput]


def decode_loop(
    model: DecoderLM,
    kv: KVPool,
    seats: Seats,
    bounds: Bounds,
    batch: StepBatch,
    backend: AttentionBackend,
    *,
    max_steps: int,
    hidden_sizes: Sequence[int] = (),
    processed: bool = False,
) -> _State:
    """Run `batch.num_steps` decode steps of each row; once all have ended or have no room, the rest are no-ops.

    The number of turns is fixed, so that a GPU need not ask the host whether there is one more.

    Args:
        batch: decode rows or lanes alone, all from seats.
        max_steps: the most steps that the compiled program can run.
        hidden_sizes: numbers of hidden states that a later program reads.
        processed: see `Noting`.

    Returns:
        The pool, the seats, the bounds, and what landed.
    """
    num_slots, noting = kv.num_slots, Noting(batch.wants_notes, processed)

    def turn(index: jax.Array, state: _State) -> _State:
        kv, seats, bounds, output = state
        # A row that no longer takes part gets no room.
        capacity = jnp.where(index < batch.num_steps, batch.capacity, 0)
        now = read_seats(replace(batch, capacity=capacity), seats, page_size=kv.page_size, num_slots=num_slots)

        bounded = bounded_draws(now, bounds)

        def run(kv: KVPool, seats: Seats) -> tuple[KVPool, Seats, jax.Array, LoopOutput]:
            kv, hidden = forward(model, kv, now, backend)
            drawn_after, sampling = hidden[now.logits_index], now.samples.sampling
            first = noted_tokens(model, drawn_after, sampling, bounded, noting)
            refused = bounded.refused(first[0])
            sampled, noted = redrawn(
                first, refused, lambda: within_masks(model, drawn_after, sampling, bounded, noting)
            )
            seats, landed = write_seats(seats, now, sampled)
            kept = output
            if output.lists is None:
                kept = lax.cond(
                    batch.wants_lists, _with_last, lambda output, *_: output, output, landed, drawn_after, sampled
                )
            else:
                lists = noting.with_lists(
                    output.lists, landed != -1, batch.wants_lists, model, drawn_after, sampled, sampling, bounded
                )
                kept = replace(output, lists=lists)
            notes = jax.tree.map(
                lambda all_steps, now: lax.dynamic_update_index_in_dim(all_steps, now, index, axis=0), kept.noted, noted
            )
            return kv, seats, landed, replace(kept, was_redrawn=kept.was_redrawn | refused, noted=notes)

        def rest(kv: KVPool, seats: Seats) -> tuple[KVPool, Seats, jax.Array, LoopOutput]:
            return kv, seats, jnp.full(output.tokens.shape[1], -1, jnp.int32), output

        kv, seats, landed, kept = lax.cond(jnp.any(now.limit >= 0), run, rest, kv, seats)
        bounds = count_latest(now, bounds, landed)
        kept = replace(kept, tokens=lax.dynamic_update_index_in_dim(output.tokens, landed, index, axis=0))
        return kv, seats, bounds, kept

    count = batch.num_sequences
    size = padded_to(hidden_sizes, count)
    nothing = LoopOutput(
        jnp.full((max_steps, count), -1, jnp.int32), jnp.zeros(count, bool),
        jnp.zeros((size, model.config.hidden_size), model.dtype), jnp.zeros(size, jnp.int32),
        Noted.nothing(max_steps, count), no_lists(count, model.config.vocab_size) if processed else None,
    )  # fmt: skip
    return lax.fori_loop(0, max_steps, turn, (kv, seats, bounds, nothing))


def _with_last(output: LoopOutput, landed: jax.Array, hidden: jax.Array, sampled: jax.Array) -> LoopOutput:
    """Return the output with hidden states [Q, hidden] and sampled tokens [Q] of the rows whose tokens landed."""
    lands, count = landed != -1, landed.shape[0]
    return replace(
        output,
        hidden=output.hidden.at[:count].set(jnp.where(lands[:, None], hidden, output.hidden[:count])),
        sampled=output.sampled.at[:count].set(jnp.where(lands, sampled, output.sampled[:count])),
    )


@dataclass(frozen=True, eq=False)
class DecodeLoop:
    """Program of up to `max_steps` decode steps. Its input is a packed batch of seated rows."""

    max_steps: int
    shapes: Sequence[BatchShape] = ()
    hidden_sizes: Sequence[int] = ()
    processed: bool = False  # log probabilities, see `Noting`
    reads = (TARGET,)
    writes = (KV, SEATS, BOUNDS)

    @property
    def planned(self) -> dict[str, BatchShape]:
        rows = [shape for shape in self.shapes if not shape.lane_pages]
        lanes = [shape for shape in self.shapes if shape.lane_pages]
        return {
            name: max(shapes, key=lambda shape: (shape.num_rows, shape.pages_per_row))
            for name, shapes in (("decode_loop", rows), ("branch_loop", lanes))
            if shapes
        }

    def describe(self, shape: BatchShape) -> str:
        return f"decode loop for {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], LoopOutput]:
        """Return the state, and what landed."""
        kv, seats, bounds = (device.state[name] for name in self.writes)
        kv, seats, bounds, output = decode_loop(
            device.models[TARGET], kv, seats, bounds, unpack(buffer, shape), device.backend,
            max_steps=self.max_steps, hidden_sizes=self.hidden_sizes, processed=self.processed,
        )  # fmt: skip
        return {KV: kv, SEATS: seats, BOUNDS: device.placed(bounds)}, device.readable(output)

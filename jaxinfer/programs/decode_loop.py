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
from jaxinfer.sampling.bounds import Bounds
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.sampling.next_tokens import noted_tokens, redrawn, within_masks
from jaxinfer.sampling.noted import Draws, Noting, logits_after


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopOutput:
    """Results of N decode steps of Q sequences, on the device."""

    tokens: jax.Array  # int32 [N, Q], -1 where a row was idle, NO_SCORE where it ends because nothing could be sampled
    was_redrawn: jax.Array  # bool [Q], first tokens that are not those of a draw without a mask
    logprobs: TokenLogprobs  # [N, Q], of these tokens, where the batch wants them; else zeros


type _State = tuple[KVPool, Seats, Bounds, LoopOutput]
# The pool, the seats, landed and refused tokens, and log probabilities.
type _AfterStep = tuple[KVPool, Seats, jax.Array, jax.Array, TokenLogprobs]


def decode_loop(
    model: DecoderLM,
    kv: KVPool,
    seats: Seats,
    bounds: Bounds,
    batch: StepBatch,
    backend: AttentionBackend,
    *,
    max_steps: int,
    processed: bool = False,
) -> _State:
    """Run `batch.num_steps` decode steps of each row; once all have ended or have no room, the rest are no-ops.

    The number of turns is fixed, so that a GPU need not ask the host whether there is one more.

    Args:
        batch: decode rows or lanes alone, all from seats.
        max_steps: the most steps that the compiled program can run.
        processed: see `Noting`.

    Returns:
        The pool, the seats, the bounds, and what landed.
    """
    num_slots, noting = kv.num_slots, Noting(batch.wants_logprobs > 0, processed)

    def turn(index: jax.Array, state: _State) -> _State:
        kv, seats, bounds, output = state
        # A row that no longer takes part gets no room.
        capacity = jnp.where(index < batch.num_steps, batch.capacity, 0)
        now = read_seats(replace(batch, capacity=capacity), seats, page_size=kv.page_size, num_slots=num_slots)

        bounded = bounded_draws(now, bounds)

        def run(kv: KVPool, seats: Seats) -> _AfterStep:
            kv, hidden = forward(model, kv, now, backend)
            drawn_after, sampling = hidden[now.logits_index], now.samples.sampling
            first = noted_tokens(model, drawn_after, sampling, bounded, noting)
            refused = bounded.refused(first[0])
            sampled, noted = redrawn(
                first, refused, lambda: within_masks(model, drawn_after, sampling, bounded, noting)
            )
            seats, landed = write_seats(seats, now, sampled)
            wanted = (batch.wants_list > 0) & (landed != -1)
            logits = logits_after(model, drawn_after)
            likely = noting.likely(wanted, lambda: Draws(logits, sampled, sampling, bounded), vocab=vocab)
            return kv, seats, landed, refused, noted.beside(likely)

        def rest(kv: KVPool, seats: Seats) -> _AfterStep:
            return kv, seats, nothing.tokens[0], jnp.zeros(count, bool), TokenLogprobs.nothing(count, vocab=vocab)

        kv, seats, landed, refused, logprobs = lax.cond(jnp.any(now.limit >= 0), run, rest, kv, seats)
        bounds = count_latest(now, bounds, landed)

        def with_step(all_steps: jax.Array, this_one: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(all_steps, this_one, index, axis=0)

        return (
            kv,
            seats,
            bounds,
            LoopOutput(
                with_step(output.tokens, landed),
                output.was_redrawn | refused,
                jax.tree.map(with_step, output.logprobs, logprobs),
            ),
        )

    count, vocab = batch.num_sequences, model.config.vocab_size
    nothing = LoopOutput(
        jnp.full((max_steps, count), -1, jnp.int32),
        jnp.zeros(count, bool),
        TokenLogprobs.nothing(max_steps, count, vocab=vocab),
    )
    return lax.fori_loop(0, max_steps, turn, (kv, seats, bounds, nothing))


@dataclass(frozen=True, eq=False)
class DecodeLoop:
    """Program of up to `max_steps` decode steps. Its input is a packed batch of seated rows."""

    max_steps: int
    shapes: Sequence[BatchShape] = ()
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
            max_steps=self.max_steps, processed=self.processed,
        )  # fmt: skip
        return {KV: kv, SEATS: seats, BOUNDS: device.placed(bounds)}, device.readable(output)

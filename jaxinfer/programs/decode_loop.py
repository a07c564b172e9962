"""Several decode steps in one launch, for rows that nobody on the host has to look at in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, idle_batch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import CONSTRAINT, KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.seats import Seats, read_seats, write_seats
from jaxinfer.sampling.constraint import Constraint, advance
from jaxinfer.sampling.next_tokens import Constrained, next_tokens

type _State = tuple[KVCache, Seats, jax.Array]


def decode_loop(
    model: DecoderLM,
    kv: KVCache,
    seats: Seats,
    batch: StepBatch,
    backend: AttentionBackend,
    *,
    max_steps: int,
    constraint: Constraint | None = None,
) -> _State:
    """`batch.num_steps` decode steps, of which each does nothing once every row has ended or has no room left.

    The number of turns is fixed, so that a GPU need not ask the host whether there is one more.

    Args:
        batch: decode rows or lanes alone, all from seats.
        max_steps: the most steps that the compiled program can run.
        constraint: that sequences may follow.

    Returns:
        The pool, the seats, and int32 [max_steps, Q]: the tokens of each step, -1 where a row was idle or a step did
        not run, `NO_SCORE` where a row ends because nothing could be sampled.
    """
    num_slots = kv.num_pages * kv.page_size

    def turn(index: jax.Array, state: tuple[_State, jax.Array]) -> tuple[_State, jax.Array]:
        (kv, seats, tokens), allowed_from = state
        now = read_seats(batch, seats, page_size=kv.page_size, num_slots=num_slots)

        def run(kv: KVCache, seats: Seats) -> tuple[KVCache, Seats, jax.Array]:
            kv, hidden = forward(model, kv, now, backend)
            held = None if constraint is None else Constrained(constraint, allowed_from)
            sampled = next_tokens(model, hidden[now.logits_index], now.samples.sampling, held)
            return kv, *write_seats(seats, now.samples, sampled)

        def rest(kv: KVCache, seats: Seats) -> tuple[KVCache, Seats, jax.Array]:
            return kv, seats, jnp.full(tokens.shape[1], -1, jnp.int32)

        anyone = (index < batch.num_steps) & jnp.any(now.limit >= 0)
        kv, seats, landed = lax.cond(anyone, run, rest, kv, seats)
        if constraint is not None:
            allowed_from = jnp.where(landed >= 0, advance(constraint, allowed_from, landed), allowed_from)
        return (kv, seats, lax.dynamic_update_index_in_dim(tokens, landed, index, axis=0)), allowed_from

    tokens = jnp.full((max_steps, batch.num_sequences), -1, jnp.int32)
    state, _ = lax.fori_loop(0, max_steps, turn, ((kv, seats, tokens), batch.constraint_state))
    return state


@dataclass(frozen=True, eq=False)
class DecodeLoop:
    """The program of up to `max_steps` decode steps. Its input is a packed batch of seated rows."""

    max_steps: int
    shapes: Sequence[BatchShape] = ()
    reads = (TARGET, CONSTRAINT)
    writes = (KV, SEATS)

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

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        """The state, and the tokens of each step."""
        model, kv, seats = device.models[TARGET], device.state[KV], device.state[SEATS]
        batch = unpack(buffer, shape)
        kv, seats, tokens = decode_loop(
            model, kv, seats, batch, device.backend, max_steps=self.max_steps, constraint=device.models.get(CONSTRAINT)
        )
        return {KV: kv, SEATS: seats}, device.readable(tokens)

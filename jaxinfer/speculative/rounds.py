"""Rounds of speculation in one launch: draft, verify, accept, and let the drafter know, for rows in their seats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, idle_batch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.seats import Seats, latest_tokens
from jaxinfer.programs.wide_rows import sampled_everywhere, wide_rows
from jaxinfer.sampling.next_tokens import next_tokens
from jaxinfer.speculative.accept import land, num_accepted
from jaxinfer.speculative.proposer import Drafts, Proposer, Seated


class RoundsShape(NamedTuple):
    """Rows of a launch, and the most tokens of each that are verified at once."""

    batch: BatchShape
    width: int  # drafted tokens and one more


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundsOutput:
    """What N rounds of R rows leave on the device. W tokens of a row are verified at once."""

    tokens: jax.Array  # int32 [N * W, R], what landed, in order for each row; -1: nothing
    num_drafts: jax.Array  # int32 [N, R], drafted
    num_accepted: jax.Array  # int32 [N, R], of these, the target's own
    entropy: jax.Array  # float32 [N, R], nats, see `Drafts`
    # Of the last round that ran, for log probabilities: hidden states [T, hidden] of R * W tokens and padding, and the
    # tokens int32 [T] that were sampled after each.
    hidden: jax.Array
    sampled: jax.Array


@dataclass(frozen=True, eq=False)
class Rounds:
    """The program of up to `max_rounds` rounds. Its input is a packed batch of seated rows, whose `num_steps` says how
    many rounds run, and `max_drafts` how many tokens are drafted for a row in each at most."""

    proposer: Proposer
    max_rounds: int
    shapes: Sequence[RoundsShape] = ()
    hidden_sizes: Sequence[int] = ()  # numbers of hidden states that a program behind this one reads

    @property
    def reads(self) -> Sequence[str]:
        return (TARGET, *self.proposer.reads)

    @property
    def writes(self) -> Sequence[str]:
        return (KV, SEATS, *self.proposer.writes)

    @property
    def planned(self) -> dict[str, RoundsShape]:
        rows = [shape for shape in self.shapes if not shape.batch.lane_pages]
        lanes = [shape for shape in self.shapes if shape.batch.lane_pages]
        return {
            name: max(shapes, key=lambda s: (s.batch.num_rows * s.width, s.batch.pages_per_row))
            for name, shapes in (("speculative_rounds", rows), ("branch_rounds", lanes))
            if shapes
        }

    def describe(self, shape: RoundsShape) -> str:
        return f"rounds of speculation for {shape.batch.describe()}, {shape.width - 1} drafts"

    def idle(self, shape: RoundsShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape.batch, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: RoundsShape, buffer: jax.Array) -> tuple[dict[str, Any], RoundsOutput]:
        batch, width = unpack(buffer, shape.batch), shape.width
        rows = shape.batch.num_rows
        fitting = [size for size in self.hidden_sizes if size >= rows * width]
        more = min(fitting, default=rows * width) - rows * width
        model = device.models[TARGET]

        def turn(index: jax.Array, carried: tuple[dict[str, Any], RoundsOutput]) -> tuple[dict[str, Any], RoundsOutput]:
            state, output = carried
            now = replace(device, state=state)
            seated = _seated(batch, state[SEATS], index < batch.num_steps, width)
            changed, drafts = self.proposer.propose(now, seated, width)
            state = {**state, **changed}

            def verify(kv: KVCache, seats: Seats, *, width: int = width) -> tuple[Any, ...]:
                some = replace(drafts, tokens=drafts.tokens[:, : width - 1])
                kv, hidden, sampled = _verified(device, kv, seated, some)
                accepted = num_accepted(some.tokens, some.count, sampled)
                seats, landed = land(
                    seats, batch.row_seat, seated.length, seated.runs, sampled, accepted,
                    ending_token_ids=batch.samples.ending_token_ids, max_len=batch.samples.max_len,
                )  # fmt: skip
                # Rows of the same layout whatever the width is.
                hidden = hidden.reshape(rows, width, -1)
                wide = (0, shape.width - width)
                hidden, sampled, landed = (
                    jnp.pad(x, ((0, 0), wide, *((0, 0),) * (x.ndim - 2)), constant_values=value)
                    for x, value in ((hidden, 0), (sampled, 0), (landed, -1))
                )
                hidden = jnp.pad(hidden.reshape(-1, hidden.shape[-1]), ((0, more), (0, 0)))
                return kv, seats, landed, accepted, hidden, jnp.pad(sampled.reshape(-1), (0, more))

            def rest(kv: KVCache, seats: Seats) -> tuple[Any, ...]:
                nothing = jnp.full((rows, width), -1, jnp.int32)
                return kv, seats, nothing, jnp.zeros(rows, jnp.int32), output.hidden, output.sampled

            ways = [rest, verify]
            way = jnp.any(seated.runs).astype(jnp.int32)
            if self.proposer.may_find_nothing:
                ways.insert(1, partial(verify, width=1))
                way += way * jnp.any(drafts.count > 0)
            kv, seats, landed, accepted, hidden, sampled = lax.switch(way, ways, state[KV], state[SEATS])
            state = {**state, KV: kv, SEATS: seats}
            state |= self.proposer.settle(replace(device, state=state), seated, landed)

            def noted(all_rounds: jax.Array, of_this: jax.Array) -> jax.Array:
                return lax.dynamic_update_index_in_dim(all_rounds, of_this, index, axis=0)

            return state, RoundsOutput(
                tokens=lax.dynamic_update_slice_in_dim(output.tokens, landed.T, index * width, axis=0),
                num_drafts=noted(output.num_drafts, drafts.count),
                num_accepted=noted(output.num_accepted, accepted),
                entropy=noted(output.entropy, drafts.entropy),
                hidden=hidden,
                sampled=sampled,
            )

        counts = jnp.zeros((self.max_rounds, rows), jnp.int32)
        output = RoundsOutput(
            tokens=jnp.full((self.max_rounds * width, rows), -1, jnp.int32),
            num_drafts=counts,
            num_accepted=counts,
            entropy=counts.astype(jnp.float32),
            hidden=jnp.zeros((rows * width + more, model.config.hidden_size), model.dtype),
            sampled=jnp.zeros(rows * width + more, jnp.int32),
        )
        state, output = lax.fori_loop(0, self.max_rounds, turn, (dict(device.state), output))
        return state, device.readable(output)


def _seated(batch: StepBatch, seats: Seats, goes_on: jax.Array, width: int) -> Seated:
    """The rows at the start of a round, and how many drafts fit before each one's end and in its pages."""
    token, length, runs = latest_tokens(batch, seats)
    runs &= goes_on
    room = jnp.minimum(batch.capacity, batch.samples.max_len - 1) - length
    wanted = jnp.minimum(jnp.minimum(batch.max_drafts, width - 1), room)
    samples = batch.samples
    position = jnp.where(runs, length, -1)
    samples = replace(samples, sampling=replace(samples.sampling, sample_position=position))
    return Seated(replace(batch, samples=samples), token, length, jnp.where(runs, jnp.maximum(wanted, 0), 0), runs)


def _verified(device: Device, kv: KVCache, seated: Seated, drafts: Drafts) -> tuple[KVCache, jax.Array, jax.Array]:
    """Each row's latest token and its drafts through the target: hidden states [R * W, hidden], and the tokens int32
    [R, W] that are sampled after each of them."""
    model = device.models[TARGET]
    tokens = jnp.concatenate([seated.token[:, None], drafts.tokens], axis=1)
    count = jnp.where(seated.runs, drafts.count + 1, 0)
    wide = wide_rows(
        seated.batch, tokens, seated.length - 1, count,
        page_size=kv.page_size, num_slots=kv.num_pages * kv.page_size,
    )  # fmt: skip
    kv, hidden = forward(model, kv, wide, device.backend)
    sampled = next_tokens(model, hidden, sampled_everywhere(wide, seated.batch.samples.sampling))
    return kv, hidden, sampled.reshape(tokens.shape)

"""Seats: what the device knows of every running sequence before the host does, and how steps read and change it.

A launch is built while the results of the one before are unknown: which token was sampled last, whether it ended its
sequence, and, where a launch lands any number of tokens, how many there are. So a decode row gives only its seat, the
pages of its lane and how far it may go; its token, position and slot are computed from its seat here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.sampling.bounds import Bounded, Bounds, counted, latest_output
from jaxinfer.sampling.greatest import NO_SCORE

ENDED = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seats:
    """One entry for each of S sequences that may run at once. Programs take it donated and return it."""

    token: jax.Array  # int32 [S], the latest token, which is not computed yet; ENDED: no token follows
    before: jax.Array  # int32 [S], the token before that, which a drafter may not have computed
    length: jax.Array  # int32 [S], tokens of the sequence, the latest included

    @classmethod
    def allocate(cls, num_seats: int, sharding: jax.sharding.Sharding | None = None) -> Seats:
        """Return empty seats; `sharding` None: on the default device."""
        token, before, length = (jnp.zeros(num_seats, jnp.int32, device=sharding) for _ in range(3))
        return cls(token + ENDED, before, length)

    def with_lengths(self, length: int) -> Seats:
        """Return other seats in the same place, all with token 0 and this length."""

        def filled(old: jax.Array, value: int) -> jax.Array:
            values = np.full(old.shape, value, np.int32)
            return jax.make_array_from_callback(values.shape, old.sharding, lambda part: values[part])

        return Seats(filled(self.token, 0), filled(self.before, 0), filled(self.length, length))

    @classmethod
    def shapes(cls, num_seats: int, sharding: jax.sharding.Sharding | None = None) -> Seats:
        """Return seats of shapes only: to compile for, not to run with."""
        shape: Any = jax.ShapeDtypeStruct((num_seats,), jnp.int32, sharding=sharding)
        return cls(shape, shape, shape)


def latest_tokens(batch: StepBatch, seats: Seats) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for each seated sequence its latest token and its length, int32 [S], and whether it runs, bool [S]: it has
    a seat, and has neither ended nor grown beyond its capacity."""
    rows = batch.num_sequences
    seat = batch.row_seat[:rows]
    token, length = (x.at[jnp.maximum(seat, 0)].get(mode="clip") for x in (seats.token, seats.length))
    return token, length, (seat >= 0) & (token != ENDED) & (length <= batch.capacity[:rows])


def read_seats(batch: StepBatch, seats: Seats, *, page_size: int, num_slots: int) -> StepBatch:
    """Return the batch with its decode rows, or lanes, completed from the seats that `batch.row_seat` names; other rows
    stay as given.

    A sequence that has ended, or would be written beyond its capacity, is idle: its token is padding in this step, and
    its `sample_position` is -1.

    Args:
        page_size, num_slots: of the pool.
    """
    rows = batch.num_sequences
    if rows == 0 or batch.decode_width > 1:
        return batch
    seated = batch.row_seat[:rows] >= 0
    token, length, runs = latest_tokens(batch, seats)
    position = length - 1
    page, index = (x[:, 0] for x in batch.places(position[:, None], page_size=page_size))
    slot = jnp.where(runs, page * page_size + position % page_size, num_slots + jnp.arange(rows))

    def filled(given: jax.Array, own: jax.Array) -> jax.Array:
        own = jnp.where(seated, own, given[:rows])
        return own if given.shape[0] == rows else given.at[:rows].set(own)

    lengths = {}
    if not batch.is_of_lanes:  # rows of lanes are as long as their pages
        kv_len = jnp.where(runs, length, 0)
        lengths = {name: filled(getattr(batch, name), kv_len) for name in ("kv_len", "trunk_len", "tail_start")}
    samples = batch.samples
    own_position = samples.sampling.sample_position
    count = min(rows, own_position.shape[0])
    # The sample of a decode row is at the row's own index; those of prompts come after the last one.
    is_own = batch.logits_index[:count] == jnp.arange(count)
    following = jnp.where(runs, length, -1)[:count]
    following = jnp.where(is_own & seated[:count], following, own_position[:count])
    return replace(
        batch,
        token_ids=filled(batch.token_ids, jnp.where(runs, token, 0)),
        positions=filled(batch.positions, jnp.where(runs, position, 0)),
        lengths=filled(batch.lengths, jnp.maximum(batch.lengths[:rows], length)),
        slot_mapping=filled(batch.slot_mapping, slot),
        limit=filled(batch.limit, jnp.where(runs, index, -1)),
        samples=replace(
            samples,
            sampling=replace(samples.sampling, sample_position=own_position.at[:count].set(following)),
        ),
        **lengths,
    )


def bounded_draws(batch: StepBatch, bounds: Bounds) -> Bounded:
    """Return the draws of a batch that is completed from the seats, with their bounds."""
    samples = batch.samples
    position = samples.sampling.sample_position
    latest = latest_output(bounds, samples.seat, batch.token_ids[batch.logits_index], position - 1)
    return Bounded(bounds, samples.seat, position, latest[:, None])


def count_latest(batch: StepBatch, bounds: Bounds, landed: jax.Array) -> Bounds:
    """Return the bounds after `landed`, int32 [Q], -1: none: the tokens that were the latest before are counted."""
    samples, latest = batch.samples, batch.token_ids[batch.logits_index]
    seat = jnp.where(landed != -1, samples.seat, bounds.binds.shape[0])
    return counted(bounds, seat, samples.sampling.sample_position[:, None] - 1, latest[:, None])


def write_seats(seats: Seats, batch: StepBatch, tokens: jax.Array) -> tuple[Seats, jax.Array]:
    """Return the seats after tokens int32 [Q] were sampled, and the tokens that landed: -1 for idle rows.

    A sequence ends with one of its ending tokens, with `NO_SCORE`, which lands in the place of a token, or at its
    greatest length.
    """
    samples = batch.samples
    position = samples.sampling.sample_position
    lands = position >= 0
    ends = (tokens == NO_SCORE) | (position + 1 >= samples.max_len)
    ends |= jnp.any(tokens[:, None] == samples.ending_token_ids, axis=1)
    at = jnp.where(lands, samples.seat, seats.token.shape[0])
    seats = Seats(
        token=seats.token.at[at].set(jnp.where(ends, ENDED, tokens), mode="drop"),
        before=seats.before.at[at].set(batch.token_ids[batch.logits_index], mode="drop"),
        length=seats.length.at[at].set(position + 1, mode="drop"),
    )
    return seats, jnp.where(lands, tokens, -1)

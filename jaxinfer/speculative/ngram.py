"""Prompt lookup: drafts the tokens that followed an earlier occurrence of a sequence's last few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.program import Device
from jaxinfer.speculative.proposer import Drafts, RoundsShape, Seated, integers

HISTORY = "history"


def look_up(tokens: jax.Array, length: jax.Array, *, shortest: int, longest: int) -> tuple[jax.Array, jax.Array]:
    """Find where the last tokens of each sequence occurred before.

    The longest match of up to `longest` last tokens wins, from `shortest` on; of equally long ones, the latest.

    Args:
        tokens: int32 [R, M].
        length: int32 [R], number of a row's tokens.

    Returns:
        int32 [R]: the place after the earlier occurrence; and bool [R]: whether there is one.
    """
    capacity = tokens.shape[1]
    place = jnp.arange(capacity)
    agrees = jnp.ones(tokens.shape, bool)
    matched = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(1, longest + 1):
        own = jnp.take_along_axis(tokens, jnp.maximum(length - back, 0)[:, None], axis=1)
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :capacity]
        agrees &= (earlier == own) & (place >= back) & (length >= back)[:, None]
        matched += agrees
    found = (matched >= shortest) & (place < length[:, None])
    score = jnp.where(found, matched * capacity + place, -1)
    return jnp.argmax(score, axis=1).astype(jnp.int32), jnp.any(found, axis=1)


class NgramProposer:
    """Proposer that drafts from each sequence's own tokens, prompt and output, which are stored on the device by seats.

    Where the end of a sequence does not occur earlier in it, nothing is drafted. If fewer tokens follow the occurrence
    than are wanted, they are repeated, because repetition often continues.

    Args:
        shortest, longest: how many of the last tokens must match at least, and how many are compared.
    """

    reads = ()
    writes = (HISTORY,)
    may_find_nothing = True
    knows_pages = False
    capture = ()

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.models: Mapping[str, Any] = {}

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        history: jax.Array = device.state[HISTORY]
        seat = batch.row_seat[batch.row]
        at = jnp.where((batch.limit >= 0) & (seat >= 0), seat, history.shape[0])
        return {HISTORY: history.at[at, batch.positions].set(batch.token_ids, mode="drop")}

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts]:
        history: jax.Array = device.state[HISTORY]
        history = _noted(history, seated, seated.length - 1, seated.token[:, None])
        own = history.at[jnp.maximum(seated.batch.row_seat, 0)].get(mode="clip")
        place, found = look_up(own, seated.length, shortest=self.shortest, longest=self.longest)
        behind = jnp.maximum(seated.length - place, 1)
        offset = jnp.arange(shape.width - 1)
        drafts = jnp.take_along_axis(own, place[:, None] + offset % behind[:, None], axis=1, mode="clip")
        rows = place.shape[0]
        return {HISTORY: history}, Drafts(drafts, jnp.where(found, seated.num_drafts, 0), jnp.zeros(rows, jnp.float32))

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        return {HISTORY: _noted(device.state[HISTORY], seated, seated.length, landed)}


def history_of(
    num_seats: int, max_len: int, whole: jax.sharding.Sharding | None = None, *, abstract: bool = False
) -> jax.Array:
    """Return an empty history int32 [S, max_len], for the tokens of S sequences.

    Args:
        whole: its sharding; None: the default device.
        abstract: return its shape alone, to compile for.
    """
    return integers((num_seats, max_len), whole, abstract=abstract)


def _noted(history: jax.Array, seated: Seated, first: jax.Array, tokens: jax.Array) -> jax.Array:
    """Write tokens int32 [R, N] of running rows to the history, at successive places from `first` on; -1: none."""
    seats, capacity = history.shape
    place = first[:, None] + jnp.arange(tokens.shape[1])
    there = seated.runs[:, None] & (tokens >= 0) & (place < capacity)
    at = jnp.where(there, seated.batch.row_seat[:, None], seats)
    return history.at[at, place].set(tokens, mode="drop")

"""Keeping accepted draft tokens: their K and V move from the tail to where their lanes continue, in all layers at once.

The functions are pure and work on arrays alone, so that a program that verifies drafts can end with them: which nodes
were accepted need not be known on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.program import KV, Device, Place
from kernels_pallas.rotate_and_write.reference import write_kv


def commit_tail(cache: KVPool, source: jax.Array, destination: jax.Array) -> KVPool:
    """Return the pool with K and V of `source` at `destination`, all moves at the same time; nothing else changes.

    Everything is read before anything is written: a slot may be the source of one move and the destination of another.
    With the cache donated the pool is updated in place, at the cost of the slots that move.

    Args:
        source: int32 [R, N], slots of accepted tokens; any slot may occur several times.
        destination: int32 [R, N], slots, each at most once.

    A move is dropped when its source or its destination is not a slot of the pool; -1 is the padding to use.
    """
    num_slots = cache.num_slots
    source, destination = source.reshape(-1), destination.reshape(-1)
    if source.size == 1:  # XLA writes a single slot in a loop, and a GPU asks the host before every turn of one
        source, destination = (jnp.pad(ends, (0, 1), constant_values=-1) for ends in (source, destination))
    is_move = (source >= 0) & (source < num_slots) & (destination >= 0) & (destination < num_slots)
    source = jnp.where(is_move, source, 0)
    # Beyond the pool, and distinct even there: the write relies on indices that differ.
    destination = jnp.where(is_move, destination, num_slots + jnp.arange(destination.size, dtype=jnp.int32))

    def moved(pages: jax.Array) -> jax.Array:
        accepted = pages.reshape(-1, *pages.shape[2:]).at[source].get(mode="promise_in_bounds")
        # Fused with its read, a write could not be in place: XLA for GPUs would copy the pool.
        return write_kv(pages, lax.optimization_barrier(accepted), destination)

    return KVPool(k=tuple(map(moved, cache.k)), v=tuple(map(moved, cache.v)))


def lane_slots(page_table: jax.Array, index: jax.Array, *, page_size: int) -> jax.Array:
    """Return the slots of lane indices, int32 [R, N], by page table int32 [R, P]; -1 for an index outside of it."""
    in_table = (index >= 0) & (index < page_table.shape[1] * page_size)
    index = jnp.where(in_table, index, 0)
    page = jnp.take_along_axis(page_table, index // page_size, axis=1, mode="promise_in_bounds")
    return jnp.where(in_table, page * page_size + index % page_size, -1)


def tail_moves(page_table: jax.Array, tail_start: jax.Array, path: jax.Array, *, page_size: int) -> jax.Array:
    """Return the moves of accepted paths to the lane indices where tails start, for lanes without branches.

    Accepted tokens of a branch go to pages of that branch instead: there `lane_slots` gives both ends of a move.

    Args:
        page_table: int32 [R, P], of the step that had the tails, as `tail_start` is.
        tail_start: int32 [R].
        path: int32 [R, N], the offsets from `tail_start` of accepted nodes, each parent before its child; -1 after the
            last one, all -1 in a row that accepts nothing.

    Returns:
        int32 [2, R, N]: source and destination slots for `commit_tail`, -1 where the path is.
    """
    first = tail_start[:, None]
    kept = first + jnp.arange(path.shape[1], dtype=jnp.int32)
    source = lane_slots(page_table, jnp.where(path >= 0, first + path, -1), page_size=page_size)
    destination = lane_slots(page_table, jnp.where(path >= 0, kept, -1), page_size=page_size)
    return jnp.stack([source, destination])


def packed_moves(moves: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Yield inputs of `CommitTail` of one shape, as many as these moves need, which are (source, destination)."""
    size = math.prod(shape)
    for start in range(0, len(moves), size):
        some = np.asarray(moves[start : start + size], np.int32)
        ends = np.full((2, size), -1, np.int32)
        ends[:, : len(some)] = some.T
        yield ends.reshape(2, *shape)


@dataclass(frozen=True, eq=False)
class CommitTail:
    """Program of `commit_tail`; its shape is (R, N), its input the moves as `tail_moves` makes them, -1 for padding.

    Both ends of the moves are in one array because a host sends one faster than two; it may be on the device already.
    """

    shapes: Sequence[tuple[int, int]] = ()
    reads = ()
    writes = (KV,)

    @property
    def planned(self) -> dict[str, tuple[int, int]]:
        return {"commit_tail": max(self.shapes)}

    def describe(self, shape: tuple[int, int]) -> str:
        return f"commit of up to {shape[1]} draft tokens in {shape[0]} rows"

    def idle(self, shape: tuple[int, int], place: Place) -> tuple[Any, ...]:
        return (np.full((2, *shape), -1, np.int32),)

    def run(self, device: Device, shape: tuple[int, int], moves: jax.Array) -> tuple[dict[str, Any], None]:
        del shape
        return {KV: commit_tail(device.state[KV], moves[0], moves[1])}, None

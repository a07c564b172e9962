"""Inside the kernel: scores of a tile are masked by the visibility rule, and unseen values are cleared.

A tile holds the slots of several pages. Within 32 slots of one page, the rule reduces to three integers per query: the
bounds between which it sees the context, and one word of tail bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.branch_attention.blocks import HEADER, PAGE, QUERY
from kernels_pallas.branch_attention.tuning import QUERY_ROWS, KernelLaunch

WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)
_WORD_SHIFT = 5
_WORD = 1 << _WORD_SHIFT
# Rows and columns that a warpgroup clears at a time.
_SQUARE = 64


@dataclass(frozen=True)
class Queries:
    """Visibility of one warpgroup's queries, int32 [QUERY_ROWS] each; the warpgroup's number and block."""

    own_bound: jax.Array
    trunk_bound: jax.Array
    branch: jax.Array
    first: jax.Array | None  # None: there are no lower bounds
    consumer: jax.Array
    block: jax.Array


@dataclass(frozen=True)
class Run:
    """Up to 32 consecutive slots of one page within a tile; arrays are scalars."""

    first: int  # number of the first slot within the tile
    size: int
    lane_index: jax.Array  # lane index of the first slot
    owner: jax.Array
    context_end: jax.Array
    word: jax.Array  # index of the tail word that holds the slots' bits
    shift: jax.Array  # number of the first slot's bit in the word


def load_queries(launch: KernelLaunch, memory: Any, block: jax.Array, consumer: jax.Array) -> Queries:
    """Load the queries' integers from shared memory."""

    def load(name: str) -> jax.Array:
        return plgpu.layout_cast(memory.integers.at[consumer, QUERY.index(name)][...], ROWS)

    bounds = load("own_bound"), load("trunk_bound"), load("branch")
    return Queries(*bounds, load("first") if launch.has_first else None, consumer, block)


def runs_of_tile(launch: KernelLaunch, memory: Any, block: jax.Array, tile: jax.Array) -> list[Run]:
    """Cut the pages of a tile into runs."""
    size = min(launch.page_size, _WORD)
    tail_page = memory.header[block, HEADER.index("tail_page")]
    runs = []
    for part in range(launch.pages_per_tile):
        entry = tile * launch.pages_per_tile + part
        lane_page, owner, context_end = (
            memory.pages[block, PAGE.index(name), entry] for name in ("lane_page", "owner", "context_end")
        )
        for offset in range(0, launch.page_size, size):
            bit = (lane_page - tail_page) * launch.page_size + offset
            # Clipping is safe: before the tail's first page no bit is used, and the last word is always 0.
            word = jnp.clip(bit >> _WORD_SHIFT, 0, max(launch.tail_words - 1, 0))
            lane_index = lane_page * launch.page_size + offset
            first = part * launch.page_size + offset
            runs.append(Run(first, size, lane_index, owner, context_end, word, bit & (_WORD - 1)))
    return runs


def hide_context(
    launch: KernelLaunch, memory: Any, queries: Queries, tile: jax.Array, scores: jax.Array, hidden: float
) -> jax.Array:
    """Set scores [QUERY_ROWS, tile] to `hidden` where a query does not see a slot; the tile has no tail."""
    parts = []
    for run in runs_of_tile(launch, memory, queries.block, tile):
        seen = _in_context(queries, run, _slots(run))
        parts.append(jnp.where(seen, scores[:, run.first : run.first + run.size], hidden))
    return jnp.concatenate(parts, axis=1)


def hide_context_and_tail(
    launch: KernelLaunch, memory: Any, queries: Queries, tile: jax.Array, scores: jax.Array, hidden: float
) -> jax.Array:
    """Mask like `hide_context`, with the tail's bits."""
    tail_start = memory.header[queries.block, HEADER.index("tail_start")]
    parts = []
    for run in runs_of_tile(launch, memory, queries.block, tile):
        slots = _slots(run)
        word = plgpu.layout_cast(memory.bits.at[queries.consumer, run.word][...], ROWS)
        bit = (_across(word, run) >> (slots + run.shift)) & 1
        # Bounds never reach beyond tail_start, and bits before it are 0: one of the two decides.
        seen = _in_context(queries, run, slots) | ((slots >= tail_start - run.lane_index) & (bit == 1))
        parts.append(jnp.where(seen, scores[:, run.first : run.first + run.size], hidden))
    return jnp.concatenate(parts, axis=1)


def clean_values(launch: KernelLaunch, memory: Any, queries: Queries, tile: jax.Array, values: Any) -> None:
    """Zero in shared memory the values that no query of the block sees: they may be NaN, and 0 * NaN is NaN."""
    block = queries.block
    runs = runs_of_tile(launch, memory, block, tile)
    dirty = jnp.bool_(False)
    for run in runs:
        dirty = dirty | (run.context_end < run.lane_index + run.size)
        if launch.has_first:
            dirty = dirty | (memory.header[block, HEADER.index("first")] > run.lane_index)

    @pl.when(dirty)
    def _():
        @pl.when(queries.consumer == 0)
        def _():
            for first in range(0, launch.tuning.tile, _SQUARE):
                inside = [run for run in runs if first <= run.first < first + _SQUARE]
                seen = _seen_by_block(launch, memory, block, first, inside)
                for column in range(0, launch.head_dim, _SQUARE):
                    square = values.at[pl.ds(first, _SQUARE), pl.ds(column, _SQUARE)]
                    kept = plgpu.layout_cast(square[...], WGMMA)
                    square[...] = jnp.where(seen, kept, jnp.zeros((), launch.dtype))
            plgpu.commit_smem()

        if launch.tuning.consumers > 1:
            plgpu.barrier_arrive(memory.v_cleaned)
            plgpu.barrier_wait(memory.v_cleaned)


def _seen_by_block(launch: KernelLaunch, memory: Any, block: jax.Array, first: int, runs: list[Run]) -> jax.Array:
    """Return bool [64, 64]: whether the block sees slot `first` + row of the tile; all columns are equal."""
    row = plgpu.broadcasted_iota(jnp.int32, (_SQUARE, _SQUARE), 0, layout=WGMMA)
    tail_start = memory.header[block, HEADER.index("tail_start")]
    # The bounds of context and the starts of the tail, in rows of the square, and the words of tail bits.
    firsts, ends, starts, words = [], [], [], []
    for run in runs:
        row_of_index_0 = run.first - first - run.lane_index
        if launch.has_first:
            firsts.append(memory.header[block, HEADER.index("first")] + row_of_index_0)
        ends.append(run.context_end + row_of_index_0)
        starts.append(tail_start + row_of_index_0)
        if launch.tail_words:
            words.append(memory.block_tail_bits[block, run.word] >> run.shift)

    def by_row(scalars: list[jax.Array]) -> jax.Array:
        values = scalars[0]
        for run, scalar in zip(runs[1:], scalars[1:], strict=True):
            values = jnp.where(row >= run.first - first, scalar, values)
        return values

    seen = row < by_row(ends)
    if launch.has_first:
        seen = seen & (row >= by_row(firsts))
    if launch.tail_words:
        bit = (by_row(words) >> (row & (runs[0].size - 1))) & 1
        seen = seen | ((row >= by_row(starts)) & (bit == 1))
    return seen


def _in_context(queries: Queries, run: Run, slots: jax.Array) -> jax.Array:
    """Return bool [QUERY_ROWS, run.size]: whether a query sees a slot of the run as context."""
    bound = jnp.where(queries.branch == run.owner, queries.own_bound, queries.trunk_bound)
    seen = slots < _across(bound - run.lane_index, run)
    return seen if queries.first is None else seen & (slots >= _across(queries.first - run.lane_index, run))


def _slots(run: Run) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (QUERY_ROWS, run.size), 1, layout=WGMMA)


def _across(rows: jax.Array, run: Run) -> jax.Array:
    return lax.broadcast_in_dim(rows, (QUERY_ROWS, run.size), [0])

"""Timing of launches of rounds and of plain steps on filled lanes, for the controller that chooses between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, idle_batch
from jaxinfer.programs.runner import Runner

# Tokens of each dummy sequence, and seconds that a launch may take after its first runs.
_CONTEXT = 128
_SECONDS = 0.1
_RUNS = 5


class LaunchTiming:
    """Timer of launches over dummy sequences in all seats, on free pages. For an engine without requests.

    Args:
        most_tokens: most tokens that a timed launch lands for a row.
    """

    def __init__(self, runner: Runner, allocator: PageAllocator, *, page_size: int, most_tokens: int) -> None:
        self._runner, self._allocator, self._page_size = runner, allocator, page_size
        self._length = _CONTEXT
        self._pages_each = -(-(_CONTEXT + most_tokens) // page_size)

    @property
    def has_room(self) -> bool:
        """Whether there are free pages for at least one sequence."""
        return self._allocator.num_free >= self._pages_each

    def seconds(
        self, shape: BatchShape, launch: Callable[[PackedBatch], Any], *, max_rounds: int, num_drafts: int = 0
    ) -> float:
        """Return the seconds of one round or step in a launch of this shape: the shortest of a few.

        Args:
            launch: runs a packed batch and returns its results.
        """
        each = min(self._pages_each, shape.pages_per_row)
        pages = self._allocator.allocate(min(self._allocator.num_free // each, shape.num_rows) * each)
        try:
            packed = self._filled(shape, np.asarray(pages, np.int32).reshape(-1, each), num_drafts)
            rounds = 1
            first = self._timed(packed, launch, rounds)  # may include work that only a first run does
            once = min(first, self._timed(packed, launch, rounds))
            rounds = max(1, min(max_rounds, int(_SECONDS / once)))
            return min(self._timed(packed, launch, rounds) for _ in range(_RUNS)) / rounds
        finally:
            self._allocator.free(pages)

    def _filled(self, shape: BatchShape, pages: np.ndarray, num_drafts: int) -> PackedBatch:
        place = self._runner.place
        packed = idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats)
        rows = np.arange(shape.num_rows)
        # With fewer pages than rows need, rows share pages: what they write is never used.
        packed["page_table"][:, : pages.shape[1]] = pages[rows % len(pages)]
        packed["capacity"][:] = pages.shape[1] * self._page_size
        packed["row_seat"][:] = packed["seat"][:] = rows
        packed["lengths"][:] = min(self._length, int(packed["capacity"][0]) // 2)
        packed["max_len"][:] = packed["capacity"][0] + 1
        packed["logits_index"][:] = rows
        packed["max_drafts"][:] = num_drafts
        return packed

    def _timed(self, packed: PackedBatch, launch: Callable[[PackedBatch], Any], rounds: int) -> float:
        packed["num_steps"][...] = rounds
        self._runner.set_lengths(int(packed["lengths"][0]))
        try:
            begin = time.perf_counter()
            jax.block_until_ready(launch(packed))
            return time.perf_counter() - begin
        finally:
            self._runner.restore_seats()

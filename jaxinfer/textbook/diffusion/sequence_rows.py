"""Packed batches for launches that denoise sequences whose tokens are all on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.diffusion.vicinity import Vicinity
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, idle_batch

_FEWEST_TOKENS = 16  # of a launch of whole sequences


@dataclass(frozen=True)
class SequenceRow:
    """A sequence that takes part in a launch."""

    seat: int
    pages: Sequence[int]
    tokens: Sequence[int]  # all of them, masks included
    prompt_len: int
    block_start: int
    round: int  # number of the round in the sequence
    temperature: float
    request_key: tuple[int, int]
    top_p: float  # 1.0: off
    top_k: int  # 0: off


@dataclass(frozen=True)
class Pool:
    """A KV pool with an equal number of consecutive pages for each seat."""

    num_seats: int
    pages_per_seat: int
    page_size: int

    @property
    def num_pages(self) -> int:
        return self.num_seats * self.pages_per_seat

    def pages_of(self, seat: int, num_tokens: int) -> list[int]:
        """Return the pages of a seat that hold `num_tokens` tokens."""
        first = seat * self.pages_per_seat
        return list(range(first, first - (-num_tokens // self.page_size)))


@dataclass(frozen=True)
class SequenceRows:
    """Packer of rows for a pool.

    Both methods return the packed batch, and int32 [Q]: where in the launch's tokens each row's block starts.
    """

    pool: Pool
    vicinity: Vicinity

    def windows(self, rows: Sequence[SequenceRow], num_rounds: int) -> tuple[PackedBatch, np.ndarray]:
        """Pack up to `num_rounds` rounds of the windows around blocks."""
        how = self.vicinity
        packed = self._idle(BatchShape(self._rows_for(len(rows)), 0, 0, self.pool.pages_per_seat, block_size=how.width))
        begins = np.zeros(packed.shape.num_logits, np.int32)
        packed["num_steps"][...] = num_rounds
        for index, row in enumerate(rows):
            self._fill(packed, index, row)
            packed["logits_index"][index], packed["lengths"][index] = index, row.prompt_len
            first = max(0, row.block_start - how.prefix_look)
            window = row.tokens[first : row.block_start + how.block_size + how.after_look]
            packed["block_tokens"][index, : len(window)] = window
            begins[index] = index * how.width + row.block_start - first
        return packed, begins

    def rests(self, rows: Sequence[SequenceRow], computed: Sequence[int]) -> tuple[PackedBatch, np.ndarray]:
        """Pack one round of whole sequences without the first `computed` tokens of each."""
        counts = [len(row.tokens) - first for row, first in zip(rows, computed, strict=True)]
        # A refresh is the most expensive round: less padding is worth a few more programs.
        tokens = rounded_up(max(sum(counts), _FEWEST_TOKENS), 4)
        packed = self._idle(BatchShape(0, self._rows_for(len(rows)), tokens, self.pool.pages_per_seat, block_size=1))
        page_size, end = self.pool.page_size, 0
        for index, (row, first, count) in enumerate(zip(rows, computed, counts, strict=True)):
            self._fill(packed, index, row)
            where, end = slice(end, end + count), end + count
            positions = np.arange(first, first + count)
            packed["token_ids"][where] = row.tokens[first:]
            packed["positions"][where], packed["limit"][where] = positions, len(row.tokens) - 1
            packed["lengths"][where] = np.maximum(positions + 1, row.prompt_len)
            pages = np.asarray(row.pages)[positions // page_size]
            packed["slot_mapping"][where] = pages * page_size + positions % page_size
            packed["row"][where] = index
            for name in ("kv_len", "trunk_len", "tail_start"):
                packed[name][index] = len(row.tokens)
            packed["query_start_loc"][index + 1 :] = end
            packed["logits_index"][index] = where.start + row.block_start - first
        return packed, packed["logits_index"].copy()

    def _rows_for(self, count: int) -> int:
        """Round up to few numbers of rows: each is one more program for every number of tokens."""
        rows = 1
        while rows < count:
            rows *= 4
        return min(rows, self.pool.num_seats)

    def _idle(self, shape: BatchShape) -> PackedBatch:
        return idle_batch(shape, num_slots=self.pool.num_pages * self.pool.page_size, num_seats=self.pool.num_seats)

    def _fill(self, packed: PackedBatch, index: int, row: SequenceRow) -> None:
        packed["page_table"][index, : len(row.pages)] = row.pages
        packed["capacity"][index] = len(row.pages) * self.pool.page_size
        packed["row_seat"][index] = packed["seat"][index] = row.seat
        packed["block_start"][index], packed["block_round"][index] = row.block_start, row.round
        packed["max_len"][index] = len(row.tokens)
        packed["temperature"][index], packed["request_key"][index] = row.temperature, row.request_key
        packed["top_p"][index], packed["top_k"][index] = row.top_p, row.top_k


def rounded_up(size: int, parts: int) -> int:
    """Round up to a size that divides the interval between two successive powers of two into `parts` equal parts."""
    step = max(1, (1 << (size - 1).bit_length()) // (2 * parts))
    return -(-size // step) * step

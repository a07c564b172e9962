"""Building of a step's arrays from the scheduler's decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.branching.branch_state import Lane
from jaxinfer.engine.lanes import fill_lanes, lanes_of
from jaxinfer.limits import MAX_ENDING_TOKEN_IDS
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, idle_batch
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.program import Program
from jaxinfer.programs.stand_ins import StandIn, as_wanted
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from jaxinfer.scheduling.scoring import given_length


@dataclass(frozen=True)
class BuiltBatch:
    """A packed step and, for each scheduled request in the scheduler's order, its places."""

    packed: PackedBatch
    rows: np.ndarray  # int32, its row of tokens
    logits_rows: np.ndarray  # int32, its row of logits and sampled tokens
    seats: np.ndarray  # int32, its seat


@dataclass
class _Pattern:
    """A batch of rounds of seated rows, from which the next one with the same rows is copied.

    It is never sent itself, so it may be written.
    """

    packed: PackedBatch
    rows: np.ndarray  # int32
    seats: np.ndarray  # int32
    seat_list: list[int]
    num_pages: np.ndarray  # int32, pages of each row
    rounds_of: Sequence[int] = ()


class ShapesOfRounds(Protocol):
    """The shapes of launches of rounds."""

    def widened(self, shape: BatchShape, seated: int, stand_in: StandIn) -> BatchShape: ...

    def shape_for(
        self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn
    ) -> BatchShape: ...


class InputBatch:
    """Arrays of what persists between steps (page tables, sampling parameters), with a seat for each request."""

    def __init__(
        self,
        buckets: Buckets,
        rounds: ShapesOfRounds,
        *,
        page_size: int,
        num_pages: int,
        step: Program | None = None,
        stand_in: StandIn = as_wanted,
    ) -> None:
        seats = buckets.max_num_seqs
        self.buckets = buckets
        self.rounds = rounds
        self._step, self._stand_in = step, stand_in
        self.page_size = page_size
        self.num_slots = page_size * num_pages
        self.free_seats = list(range(seats - 1, -1, -1))
        self.seat_of: dict[str, int] = {}
        self.page_table = np.zeros((seats, buckets.pages_per_row[-1]), np.int32)
        self.num_pages = np.zeros(seats, np.int32)
        self.rope_length = np.zeros(seats, np.int32)
        self.max_len = np.zeros(seats, np.int32)
        self.temperature = np.zeros(seats, np.float32)
        self.top_k = np.zeros(seats, np.int32)
        self.top_p = np.ones(seats, np.float32)
        self.min_p = np.zeros(seats, np.float32)
        self.request_key = np.zeros((seats, 2), np.uint32)
        self.ending_token_ids = np.full((seats, MAX_ENDING_TOKEN_IDS), -1, np.int32)
        self._pattern: _Pattern | None = None

    def build(self, output: SchedulerOutput) -> BuiltBatch:
        """Build the arrays of one step; also take in new requests and new pages."""
        requests, counts = output.requests, np.asarray(output.num_tokens, np.int32)
        if output.first_scheduled or output.resumed:
            for request in requests:
                if request.request_id not in self.seat_of:
                    self._enter(request)
        for index, new_pages in enumerate(output.new_pages):
            if new_pages:
                self._add_pages(requests[index].seat, requests[index].pages)
        seat_list = [request.seat for request in requests]
        seats = np.asarray(seat_list, np.int32)
        # The device would let a row without a page for its tokens wait for ever.
        num_pages = self.num_pages[seats]
        has_pages = num_pages * self.page_size >= counts + output.num_computed
        assert has_pages.all(), "a row has no page for its tokens"
        if output.num_rounds and output.shares_lanes:
            lanes = lanes_of(requests, self.page_table.shape[1], output.rounds.most_in_lane)
            if len(lanes) < len(requests):
                return self._build_lanes(output, lanes, seats)
        if output.num_rounds and RowKind.PROMPT_CHUNK not in output.kinds:
            return self._build_rounds(output, seat_list, seats, num_pages)

        is_seated = np.asarray([kind is not RowKind.PROMPT_CHUNK for kind in output.kinds], bool)
        seated, chunks = np.flatnonzero(is_seated), np.flatnonzero(~is_seated)
        shape = self.buckets.shape_for(
            decode_rows=len(seated),
            prefill_rows=len(chunks),
            prefill_tokens=int(counts[chunks].sum()),
            pages_per_row=int(num_pages.max()),
        )
        if output.num_rounds:
            shape = self.rounds.widened(shape, len(seated), self._stand_in)
        elif self._step is not None:
            shape = self._stand_in(self._step, shape)
        rows = np.zeros(len(requests), np.int32)
        rows[seated] = np.arange(len(seated))
        rows[chunks] = shape.decode_rows + np.arange(len(chunks))
        # There are as many rows of logits as there can be requests, without padding between decodes and prefills.
        logits_rows = np.where(is_seated, rows, rows - (shape.decode_rows - len(seated)))
        packed = self._begin(shape, rows, seats)
        if output.rounds_of:
            packed["num_steps"][rows] = output.rounds_of
        packed["lengths"][: len(seated)] = self.rope_length[seats[seated]]
        if len(chunks):
            computed = np.asarray(output.num_computed, np.int32)[chunks]
            of_chunks = [requests[index] for index in chunks.tolist()]
            self._fill_chunks(packed, of_chunks, computed, counts[chunks], rows[chunks], seats[chunks])
        lands = np.asarray(output.most_tokens) > 0
        packed["seat"][logits_rows[lands]] = seats[lands]
        packed["logits_index"][logits_rows] = packed["query_start_loc"][rows + 1] - 1
        packed["sample_position"][logits_rows[chunks]] = packed["kv_len"][rows[chunks]]
        self._fill_sampling(packed, logits_rows, seats)
        return BuiltBatch(packed, rows, logits_rows, seats)

    def _build_rounds(
        self, output: SchedulerOutput, seat_list: list[int], seats: np.ndarray, num_pages: np.ndarray
    ) -> BuiltBatch:
        """Build the arrays of a launch of rounds whose rows are all in their seats.

        Most have the rows of the launch before, and differ from it by few pages.

        Args:
            seat_list: the seat of each row.
            seats: the same, int32.
            num_pages: int32, the pages of each row.
        """
        assert all(output.most_tokens), "a row of rounds lands a token"
        shape = self.rounds.shape_for(
            output.rounds, rows=len(seats), pages_per_row=int(num_pages.max()), lanes=False, stand_in=self._stand_in
        )
        pattern = self._pattern
        if pattern is None or pattern.packed.shape is not shape or pattern.seat_list != seat_list:
            rows = np.arange(len(seats), dtype=np.int32)
            packed = self._begin(shape, rows, seats)
            packed["lengths"][rows] = self.rope_length[seats]
            packed["seat"][rows] = seats
            packed["logits_index"][rows] = packed["query_start_loc"][rows + 1] - 1
            self._fill_sampling(packed, rows, seats)
            pattern = self._pattern = _Pattern(packed, rows, seats, seat_list, num_pages)
        else:
            changed = np.flatnonzero(pattern.num_pages != num_pages)
            if len(changed):
                self._fill_pages(pattern.packed, changed, seats[changed])
                pattern.num_pages = num_pages
        if pattern.rounds_of != output.rounds_of:
            pattern.packed["num_steps"][: len(seats)] = pattern.rounds_of = output.rounds_of
        return BuiltBatch(pattern.packed.copy(), pattern.rows, pattern.rows, pattern.seats)

    def _build_lanes(
        self, output: SchedulerOutput, lanes: Sequence[tuple[Lane, list[int]]], seats: np.ndarray
    ) -> BuiltBatch:
        """Build the arrays of a launch of rounds in which some sequences share a lane."""
        requests = output.requests
        pages = max(len(lane.pages) for lane, _ in lanes)
        shape = self.rounds.shape_for(
            output.rounds, rows=len(requests), pages_per_row=pages, lanes=True, stand_in=self._stand_in
        )
        packed = idle_batch(shape, num_slots=self.num_slots, num_seats=len(self.page_table))
        # The first page that may be written is that of the last but one of the tokens that are certain to be known.
        least = [
            len(request.token_ids) + request.num_sure_in_flight - now
            for request, now in zip(requests, output.least_tokens, strict=True)
        ]
        first_pages = (np.asarray(least, np.int32) - 2) // self.page_size
        places = fill_lanes(packed, lanes, requests, first_pages, self.page_size)
        packed["num_steps"][places] = output.rounds_of
        packed["row_seat"][places] = packed["seat"][places] = seats
        packed["capacity"][places] = np.minimum(self.num_pages[seats], first_pages + shape.lane_pages) * self.page_size
        packed["lengths"][places] = self.rope_length[seats]
        packed["logits_index"][:] = np.arange(shape.num_logits)
        self._fill_sampling(packed, places, seats)
        return BuiltBatch(packed, places, places, seats)

    def _fill_sampling(self, packed: PackedBatch, logits_rows: np.ndarray, seats: np.ndarray) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "request_key", "ending_token_ids", "max_len"):
            packed[name][logits_rows] = getattr(self, name)[seats]

    def build_chunks(
        self, shape: BatchShape, requests: Sequence[Request], computed: Sequence[int], counts: Sequence[int]
    ) -> PackedBatch:
        """Build a batch of known tokens of seated requests, and nothing else: `counts` after the first `computed`.

        Nothing is sampled; each row's logits are those of its last token.
        """
        rows = np.arange(len(requests), dtype=np.int32)
        seats = np.asarray([request.seat for request in requests], np.int32)
        packed = self._begin(shape, rows, seats)
        self._fill_chunks(packed, requests, np.asarray(computed, np.int32), np.asarray(counts, np.int32), rows, seats)
        packed["seat"][rows] = seats
        packed["logits_index"][rows] = packed["query_start_loc"][rows + 1] - 1
        packed["sample_position"][rows] = packed["kv_len"][rows]
        return packed

    def _begin(self, shape: BatchShape, rows: np.ndarray, seats: np.ndarray) -> PackedBatch:
        """Build a batch of padding, in which rows have only their seats and pages."""
        packed = idle_batch(shape, num_slots=self.num_slots, num_seats=len(self.page_table))
        self._fill_pages(packed, rows, seats)
        packed["row_seat"][rows] = seats
        return packed

    def _fill_pages(self, packed: PackedBatch, rows: np.ndarray, seats: np.ndarray) -> None:
        packed["page_table"][rows] = self.page_table[seats, : packed.shape.pages_per_row]
        packed["capacity"][rows] = self.num_pages[seats] * self.page_size

    def _fill_chunks(
        self,
        packed: PackedBatch,
        requests: Sequence[Request],
        computed: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray,
        seats: np.ndarray,
    ) -> None:
        """Fill in the tokens of chunks, packed one after the other, after the decode rows."""
        shape = packed.shape
        total = int(counts.sum())
        first = np.cumsum(counts) - counts
        where = slice(shape.decode_rows, shape.decode_rows + total)
        positions = np.arange(total, dtype=np.int32) + np.repeat(computed - first, counts).astype(np.int32)
        seat = np.repeat(seats, counts)
        tokens = packed["token_ids"]
        begins = (shape.decode_rows + first).tolist()
        for request, begin, start, count in zip(requests, begins, computed.tolist(), counts.tolist(), strict=True):
            known = request.token_ids[start : start + count]
            tokens[begin : begin + len(known)] = known  # a strategy fills in what is not known
        packed["positions"][where] = packed["limit"][where] = positions
        packed["lengths"][where] = np.maximum(positions + 1, self.rope_length[seat])
        packed["slot_mapping"][where] = (
            self.page_table[seat, positions // self.page_size] * self.page_size + positions % self.page_size
        )
        packed["row"][where] = np.repeat(rows, counts)
        for name in ("kv_len", "trunk_len", "tail_start"):  # everything is trunk, and there is no tail
            packed[name][rows] = computed + counts
        starts = packed["query_start_loc"]
        starts[shape.decode_rows + 1 : shape.decode_rows + 1 + len(rows)] = shape.decode_rows + first + counts
        starts[shape.decode_rows + 1 + len(rows) :] = shape.decode_rows + total

    def _enter(self, request: Request) -> int:
        self._pattern = None  # its seats have other requests from here on
        seat = request.seat = self.free_seats.pop()
        self.seat_of[request.request_id] = seat
        self.num_pages[seat] = 0
        self.rope_length[seat] = max(given_length(request.num_prompt_tokens, request.scoring), request.rope_length)
        self.max_len[seat] = request.max_total_tokens
        params = request.sampling_params
        self.temperature[seat] = params.temperature
        self.top_k[seat] = max(params.top_k, 0)
        self.top_p[seat] = params.top_p
        self.min_p[seat] = params.min_p
        self.request_key[seat] = request.request_key
        ending = sorted(request.ending_token_ids)[:MAX_ENDING_TOKEN_IDS]
        self.ending_token_ids[seat] = -1
        self.ending_token_ids[seat, : len(ending)] = ending
        return seat

    def _add_pages(self, seat: int, pages: Sequence[int]) -> None:
        known = self.num_pages[seat]
        self.page_table[seat, known : len(pages)] = pages[known:]
        self.num_pages[seat] = len(pages)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Free the seats of finished or preempted requests."""
        for request_id in request_ids:
            seat = self.seat_of.pop(request_id, None)
            if seat is not None:  # else it was aborted before it ever ran
                self.free_seats.append(seat)

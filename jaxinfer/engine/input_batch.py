"""From the scheduler's decisions to the arrays of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import SchedulerOutput
from jaxinfer.limits import MAX_ENDING_TOKEN_IDS
from jaxinfer.programs.batch_layout import PackedBatch
from jaxinfer.programs.buckets import Buckets


@dataclass(frozen=True)
class BuiltBatch:
    """A packed step and, for each scheduled request in the scheduler's order, the places that it got."""

    packed: PackedBatch
    rows: np.ndarray  # int32, its row of tokens
    logits_rows: np.ndarray  # int32, its row of logits and sampled tokens


class InputBatch:
    """Keeps what does not change from step to step (page tables, sampling parameters) in arrays, one seat a request."""

    def __init__(self, buckets: Buckets, *, page_size: int, num_pages: int) -> None:
        seats = buckets.max_num_seqs
        self.buckets = buckets
        self.page_size = page_size
        self.num_slots = page_size * num_pages
        self.free_seats = list(range(seats - 1, -1, -1))
        self.seat_of: dict[str, int] = {}
        self.page_table = np.zeros((seats, buckets.pages_per_row[-1]), np.int32)
        self.num_pages = np.zeros(seats, np.int32)
        self.prompt_len = np.zeros(seats, np.int32)
        self.temperature = np.zeros(seats, np.float32)
        self.top_k = np.zeros(seats, np.int32)
        self.top_p = np.ones(seats, np.float32)
        self.min_p = np.zeros(seats, np.float32)
        self.request_key = np.zeros((seats, 2), np.uint32)
        self.ending_token_ids = np.full((seats, MAX_ENDING_TOKEN_IDS), -1, np.int32)
        # Which of its tokens, counted from the prompt's first, a seat will hold on the device; -1: none of it.
        self.on_device = np.full(seats, -1, np.int32)

    def build(self, output: SchedulerOutput) -> BuiltBatch:
        """The arrays of one step; also takes over arrivals and new pages."""
        requests, counts = output.requests, np.asarray(output.num_tokens, np.int32)
        if output.first_scheduled or output.resumed:
            for request in requests:
                if request.request_id not in self.seat_of:
                    self._enter(request)
        for index, new_pages in enumerate(output.new_pages):
            if new_pages:
                self._add_pages(requests[index].seat, requests[index].pages)
        seats = np.asarray([request.seat for request in requests], np.int32)
        computed = np.asarray(output.num_computed, np.int32)
        kv_len = computed + counts

        is_decode = counts == 1
        decodes = np.flatnonzero(is_decode)
        prefills = np.flatnonzero(~is_decode)
        pages = int(self.num_pages[seats].max())
        if output.num_steps > 1:
            shape = self.buckets.loop_for(decode_rows=len(decodes), pages_per_row=pages)
        else:
            shape = self.buckets.shape_for(
                decode_rows=len(decodes),
                prefill_rows=len(prefills),
                prefill_tokens=int(counts[prefills].sum()),
                pages_per_row=pages,
            )
        rows = np.zeros(len(requests), np.int32)
        rows[decodes] = np.arange(len(decodes))
        rows[prefills] = shape.decode_rows + np.arange(len(prefills))
        # Logits are as many as there can be requests, and no padding is between those of decodes and of prefills.
        logits_rows = np.where(is_decode, rows, rows - (shape.decode_rows - len(decodes)))
        packed = PackedBatch(shape)
        self._fill_rows(packed, rows, seats, kv_len)
        self._fill_tokens(packed, requests, rows, seats, computed, counts, decodes, prefills)
        self._fill_sampling(packed, logits_rows, seats, kv_len)
        packed["logits_index"][logits_rows] = packed["query_start_loc"][rows + 1] - 1
        samples = np.asarray(output.samples)
        packed["seat"][:] = len(self.page_table)
        packed["seat"][logits_rows[samples]] = seats[samples]
        packed["num_steps"][...] = output.num_steps
        self.on_device[seats[samples]] = kv_len[samples] + output.num_steps - 1
        return BuiltBatch(packed, rows, logits_rows)

    def _fill_rows(self, packed: PackedBatch, rows: np.ndarray, seats: np.ndarray, kv_len: np.ndarray) -> None:
        pages = packed.shape.pages_per_row
        packed["page_table"][rows] = self.page_table[seats, :pages]
        packed["page_branch"][:] = -1
        for name in ("kv_len", "trunk_len", "tail_start"):  # everything is trunk, and there is no tail
            packed[name][rows] = kv_len

    def _fill_sampling(self, packed: PackedBatch, rows: np.ndarray, seats: np.ndarray, kv_len: np.ndarray) -> None:
        packed["temperature"][rows] = self.temperature[seats]
        packed["top_k"][rows] = self.top_k[seats]
        packed["top_p"][:] = 1.0
        packed["top_p"][rows] = self.top_p[seats]
        packed["min_p"][rows] = self.min_p[seats]
        packed["request_key"][rows] = self.request_key[seats]
        packed["sample_position"][rows] = kv_len
        packed["ending_token_ids"][:] = -1
        packed["ending_token_ids"][rows] = self.ending_token_ids[seats]

    def _fill_tokens(
        self,
        packed: PackedBatch,
        requests: Sequence[Request],
        rows: np.ndarray,
        seats: np.ndarray,
        computed: np.ndarray,
        counts: np.ndarray,
        decodes: np.ndarray,
        prefills: np.ndarray,
    ) -> None:
        shape = packed.shape
        total = int(counts[prefills].sum())
        # Indices into T of the scheduled tokens: decode rows first, then the packed prefill chunks.
        where = np.concatenate([np.arange(len(decodes)), shape.decode_rows + np.arange(total)]).astype(np.int32)
        order = np.concatenate([decodes, prefills])
        repeat = counts[order]
        first = np.cumsum(repeat) - repeat
        offset = np.arange(len(where), dtype=np.int32) - np.repeat(first, repeat).astype(np.int32)
        positions = np.repeat(computed[order], repeat) + offset
        seat = np.repeat(seats[order], repeat)

        # The latest sampled token is on the device, at its request's seat, whether it has landed or not.
        tokens = -1 - seats[decodes]
        for i in np.flatnonzero(self.on_device[seats[decodes]] != computed[decodes]).tolist():
            tokens[i] = requests[decodes[i]].token_ids[computed[decodes[i]]]
        packed["token_ids"][: len(decodes)] = tokens
        if total:
            chunks = [requests[i].token_ids[computed[i] : computed[i] + counts[i]] for i in prefills.tolist()]
            packed["token_ids"][shape.decode_rows : shape.decode_rows + total] = np.concatenate(chunks)
        packed["positions"][where] = positions
        packed["lengths"][where] = np.maximum(positions + 1, self.prompt_len[seat])
        packed["slot_mapping"][:] = self.num_slots + np.arange(shape.num_tokens)
        packed["slot_mapping"][where] = (
            self.page_table[seat, positions // self.page_size] * self.page_size + positions % self.page_size
        )
        packed["row"][where] = np.repeat(rows[order], repeat)
        packed["limit"][:] = -1
        packed["limit"][where] = positions
        packed["branch"][:] = -1

        starts = packed["query_start_loc"]
        starts[: shape.decode_rows] = np.arange(shape.decode_rows)
        ends = shape.decode_rows + np.cumsum(counts[prefills])
        starts[shape.decode_rows] = shape.decode_rows
        starts[shape.decode_rows + 1 : shape.decode_rows + 1 + len(prefills)] = ends
        starts[shape.decode_rows + 1 + len(prefills) :] = shape.decode_rows + total

    def _enter(self, request: Request) -> int:
        seat = request.seat = self.free_seats.pop()
        self.seat_of[request.request_id] = seat
        self.on_device[seat] = -1
        self.num_pages[seat] = 0
        self.prompt_len[seat] = request.num_prompt_tokens
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
        """Take over departures: finished or preempted requests leave their seats."""
        for request_id in request_ids:
            seat = self.seat_of.pop(request_id, None)
            if seat is not None:  # else it was aborted before it ever ran
                self.free_seats.append(seat)

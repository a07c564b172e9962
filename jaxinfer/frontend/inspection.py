"""What an engine holds, counted between two steps: for operators and tests that look for leaks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.engine.core import EngineCore


@dataclass(frozen=True)
class EngineInspection:
    """Counts of what an engine holds.

    Attributes:
        fault: what is wrong with the states of pages; None: every page is in exactly one state.
        num_pages: pages of the pool, each of which is free, cached or held by requests.
        num_seats: seats for running requests.
        num_requests: requests that have not ended.
        num_readers: readers whose last output was not delivered yet.
    """

    fault: str | None
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    num_seats: int
    num_free_seats: int
    num_requests: int
    num_readers: int = 0


def inspect_engine(core: EngineCore, num_readers: int) -> EngineInspection:
    """Count what an engine holds; only the thread that steps it may call this, between two steps."""
    fault = None
    try:
        core.check_integrity()
    except AssertionError as error:
        fault = str(error) or "the states of pages disagree"
    allocator, scheduler, seats = core.scheduler.kv.allocator, core.scheduler, core.input_batch
    return EngineInspection(
        fault=fault,
        num_pages=allocator.num_pages,
        num_free_pages=allocator.num_free,
        num_cached_pages=allocator.num_cached,
        num_held_pages=allocator.num_held,
        num_seats=core.config.max_num_seqs,
        # Seats of requests that have ended are given back with the next launch.
        num_free_seats=len(seats.free_seats) + sum(name in seats.seat_of for name in scheduler.finished_req_ids),
        num_requests=len(scheduler.requests),
        num_readers=num_readers,
    )

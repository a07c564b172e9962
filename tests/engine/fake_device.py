"""A device in plain Python: slots that remember what was written to them, and a model that reads them all back."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduler, SchedulerLimits, SchedulerOutput

VOCAB = 1000


def next_token(token_ids: Sequence[int]) -> int:
    """What the pretended model says after these tokens: a hash of every one of them."""
    return zlib.crc32(np.asarray(token_ids, np.int64).tobytes()) % VOCAB


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that a request must get, whatever is scheduled beside it."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeDevice:
    """Runs a scheduler's steps. A request whose pages were given away, or not recomputed, gets a wrong token."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token)

    def slot(self, request: Request, index: int) -> int:
        return request.pages[index // self.page_size] * self.page_size + index % self.page_size

    def run(self, output: SchedulerOutput) -> list[int]:
        """A token for every scheduled request, from what stands in its slots after all writes of the step."""
        scheduled = list(zip(output.requests, output.num_tokens, strict=True))
        for request, count in scheduled:
            for index in range(request.num_computed_tokens, request.num_computed_tokens + count):
                self.slots[self.slot(request, index)] = (index, request.token_ids[index])
        tokens = []
        for request, count in scheduled:
            known = range(request.num_computed_tokens + count)
            read = [self.slots.get(self.slot(request, index), (-1, -1)) for index in known]
            in_place = all(position == index for index, (position, _) in enumerate(read))
            tokens.append(next_token([token for _, token in read]) if in_place else -1)
        return tokens


def make_scheduler(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    budget: int = 32,
    rows: int = 4,
    prefill_rows: int | None = None,
    policy: str = "fcfs",
) -> Scheduler:
    """A scheduler over a pool of its own; as many rows may hold prefills as there are rows, unless told otherwise."""
    limits = SchedulerLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=rows,
        max_prefill_rows=rows if prefill_rows is None else prefill_rows,
        page_size=page_size,
        scheduling_policy=policy,
    )
    return Scheduler(limits, PageAllocator(num_pages))


class Simulation:
    """A scheduler with a fake device, stepped by hand."""

    def __init__(self, **limits) -> None:
        self.scheduler = make_scheduler(**limits)
        self.device = FakeDevice(self.scheduler.limits.page_size)
        self.arrivals = 0

    def add(self, request: Request) -> Request:
        request.arrival = self.arrivals
        self.arrivals += 1
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.scheduler.update_from_output(output, self.device.run(output))
        self.scheduler.check_integrity()
        return output

    def drain(self, max_steps: int = 10_000) -> int:
        """Step until everything is finished; how many steps it took."""
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return steps
            assert self.step().total_num_scheduled_tokens > 0, "a step did nothing for unfinished requests"
        raise AssertionError(f"unfinished after {max_steps} steps")

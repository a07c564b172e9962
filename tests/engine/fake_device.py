"""A device in plain Python: slots that remember what was written to them, and a model that reads them all back."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import PrefixCache, PrefixCacheConfig
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Landing, Scheduler, SchedulerLimits, SchedulerOutput

VOCAB = 60


def next_token(token_ids: Sequence[int]) -> int:
    """What the pretended model says after these tokens: a hash of every one of them."""
    return zlib.crc32(np.asarray(token_ids, np.int64).tobytes()) % VOCAB


def expected_output(prompt: Sequence[int], num_tokens: int, ending: Collection[int] = ()) -> list[int]:
    """The tokens that a request must get, whatever is scheduled beside it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(next_token(ids))
        if ids[-1] in ending:
            break
    return ids[len(prompt) :]


class FakeDevice:
    """Runs launches in order. A request whose pages were given away, or not recomputed, gets a wrong token.

    Like the real one it keeps the latest token of every request, so that a launch can follow one that was not read yet.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.latest: dict[Request, int] = {}

    def run(self, output: SchedulerOutput) -> list[list[int]]:
        """For every scheduled request the tokens of each step that ran, -1 once it has ended."""
        after = [request.num_computed_tokens - (output.num_steps - 1) for request in output.requests]
        spans = [range(end - count, end) for end, count in zip(after, output.num_tokens, strict=True)]
        results: list[list[int]] = [[] for _ in output.requests]
        ended = [False] * len(results)
        for _ in range(output.num_steps):
            for request, span, over in zip(output.requests, spans, ended, strict=True):
                for index in span if not over else ():
                    known = request.token_ids
                    token = known[index] if index < len(known) else self.latest[request]
                    self.slots[self._slot(request, index)] = (index, token)
            for row, (request, span) in enumerate(zip(output.requests, spans, strict=True)):
                token = -1 if ended[row] else self._next(request, span.stop)
                results[row].append(token)
                ended[row] = ended[row] or token in request.ending_token_ids
                if output.samples[row]:
                    self.latest[request] = token
                else:
                    results[row][-1] = -2  # means nothing, and must not be looked at
            if all(ended):
                break
            spans = [range(span.stop, span.stop + 1) for span in spans]
        return results

    def poison(self, pages: Iterable[int]) -> None:
        """Forget what was written to the pages."""
        for page in pages:
            for slot in range(page * self.page_size, (page + 1) * self.page_size):
                self.slots.pop(slot, None)

    def _slot(self, request: Request, index: int) -> int:
        return request.pages[index // self.page_size] * self.page_size + index % self.page_size

    def _next(self, request: Request, length: int) -> int:
        read = [self.slots.get(self._slot(request, index), (-1, -1)) for index in range(length)]
        in_place = all(position == index for index, (position, _) in enumerate(read))
        return next_token([token for _, token in read]) if in_place else VOCAB


def make_scheduler(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    budget: int = 32,
    rows: int = 4,
    prefill_room: Callable[[int, int], int] | None = None,
    policy: str = "fcfs",
    max_decode_steps: int = 1,
    caching: bool = False,
    device: FakeDevice | None = None,
) -> Scheduler:
    """A scheduler over a pool of its own; all rows and all of the budget may be prefills, unless told otherwise.

    What is freed is lost on `device`.
    """
    limits = SchedulerLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=rows,
        prefill_room=prefill_room or (lambda decode_rows, prefill_rows: budget),
        scheduling_policy=policy,
        max_decode_steps=max_decode_steps,
    )
    allocator = PoisonedPages(num_pages, device or FakeDevice(page_size))
    cache = PrefixCache(PrefixCacheConfig(page_size), allocator) if caching else None
    return Scheduler(limits, KVCacheManager(allocator, page_size, cache))


class PoisonedPages(PageAllocator):
    """Pages whose content is gone as soon as they are free."""

    def __init__(self, num_pages: int, device: FakeDevice) -> None:
        super().__init__(num_pages)
        self._device = device

    def free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().free(pages)
        self._device.poison([page for page in pages if not self.num_holders(page)])

    def free_cached(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().free_cached(pages)
        self._device.poison(pages)


class Simulation:
    """A scheduler with a fake device, stepped by hand."""

    def __init__(self, *, page_size: int = 4, **limits) -> None:
        self.device = FakeDevice(page_size)
        self.scheduler = make_scheduler(page_size=page_size, device=self.device, **limits)
        self.in_flight: deque[tuple[SchedulerOutput, list[list[int]]]] = deque()
        self.arrivals = 0

    def add(self, request: Request) -> Request:
        request.arrival = self.arrivals
        self.arrivals += 1
        self.scheduler.add_request(request)
        return request

    def launch(self) -> SchedulerOutput:
        """Schedule a launch and let the device run it; its results are not read yet."""
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if output.requests:
            self.in_flight.append((output, self.device.run(output)))
        return output

    def land(self) -> list[Landing]:
        """Read the results of the oldest launch."""
        landings = self.scheduler.update_from_output(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        return landings

    def step(self) -> SchedulerOutput:
        """Launch, and read everything that is in flight."""
        output = self.launch()
        while self.in_flight:
            self.land()
        return output

    def drain(self, max_steps: int = 10_000) -> int:
        """Step until everything is finished; how many steps it took."""
        while self.in_flight:
            self.land()
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return steps
            assert self.step().total_num_scheduled_tokens > 0, "a step did nothing for unfinished requests"
        raise AssertionError(f"unfinished after {max_steps} steps")

"""A device in plain Python: slots that remember what was written to them, and a model that reads them all back."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import CacheConfig, PrefixCache
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.pace import Pace
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler import Landing, Scheduler, SchedulerLimits, SchedulerOutput

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

    Like the real one it keeps the latest token and the length of every sequence, so that a launch can follow one that
    was not read yet. It knows the pages that launches have named, and writes nothing beyond them.

    Args:
        tokens_of_round: how many tokens the next round of the strategy lands for a row.
    """

    def __init__(self, page_size: int, tokens_of_round: Callable[[], int] = lambda: 1) -> None:
        self.page_size = page_size
        self.tokens_of_round = tokens_of_round
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.seats: dict[Request, tuple[int | None, int]] = {}  # latest token, None: ended; and length
        self.pages: dict[Request, list[int]] = {}

    def run(self, output: SchedulerOutput) -> list[list[int]]:
        """For every scheduled request the tokens that land."""
        results: list[list[int]] = [[] for _ in output.requests]
        for request, new_pages in zip(output.requests, output.new_pages, strict=True):
            if new_pages:
                self.pages[request] = list(request.pages)
        capacity = [len(self.pages[request]) * self.page_size for request in output.requests]
        for index, (request, kind) in enumerate(zip(output.requests, output.kinds, strict=True)):
            if kind is RowKind.PROMPT_CHUNK:
                end = output.num_computed[index] + output.num_tokens[index]
                for position in range(output.num_computed[index], end):
                    self._write(request, position, request.token_ids[position])
        for request in output.requests:
            if request.request_id in output.enters:
                self.seats[request] = (request.token_ids[-1], request.num_tokens)
        for index, (request, kind) in enumerate(zip(output.requests, output.kinds, strict=True)):
            if kind is RowKind.PROMPT_CHUNK:
                end = output.num_computed[index] + output.num_tokens[index]
                results[index] = [self._sample(request, end)] if output.most_tokens[index] else [-2]  # not to be read
                continue
            for _ in range(output.rounds_of[index] if output.rounds_of else 1):
                for _ in range(1 if output.kinds[index] is RowKind.DECODE else self.tokens_of_round()):
                    token, length = self.seats[request]
                    if token is not None and length <= capacity[index]:
                        self._write(request, length - 1, token)
                        results[index].append(self._sample(request, length))
        return results

    def _write(self, request: Request, position: int, token: int) -> None:
        self.slots[self._slot(request, position)] = (position, token)

    def _sample(self, request: Request, length: int) -> int:
        token = self._next(request, length)
        ends = token in request.ending_token_ids or length + 1 >= request.max_total_tokens
        self.seats[request] = (None if ends else token, length + 1)
        return token

    def poison(self, pages: Iterable[int]) -> None:
        """Forget what was written to the pages."""
        for page in pages:
            for slot in range(page * self.page_size, (page + 1) * self.page_size):
                self.slots.pop(slot, None)

    def _slot(self, request: Request, index: int) -> int:
        return self.pages[request][index // self.page_size] * self.page_size + index % self.page_size

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
    )
    allocator = PoisonedPages(num_pages, device or FakeDevice(page_size))
    cache = PrefixCache(CacheConfig(page_size), allocator) if caching else None
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


class Beside(Pace):
    """A pace with a given number of rounds after chunks of prompts, whatever anything costs.

    Args:
        rounds: maps the most rounds that there may be to how many run.
    """

    def __init__(self, rounds: Callable[[int], int] = lambda most: most) -> None:
        super().__init__()
        self._rounds = rounds

    def within(self, kind, seconds):
        return sys.maxsize

    def beside_one_round(self, kind, most, **rows):
        return most

    def beside_chunks(self, kind, most, tokens, **known):
        return self._rounds(most)


class Simulation:
    """A scheduler with a fake device, stepped by hand.

    Args:
        beside: how many rounds, up to the most that there may be, run after chunks of prompts; None: as is measured.
        rounds: what launches of seated rows are; None: up to `max_decode_steps` steps.
    """

    def __init__(
        self,
        *,
        page_size: int = 4,
        tokens_of_round: Callable[[], int] = lambda: 1,
        device: FakeDevice | None = None,
        beside: Callable[[int], int] | None = None,
        max_decode_steps: int = 1,
        rounds: Rounds | None = None,
        **limits,
    ) -> None:
        self.device = device or FakeDevice(page_size, tokens_of_round)
        self.scheduler = make_scheduler(page_size=page_size, device=self.device, **limits)
        self.rounds = rounds or Rounds(RowKind.DECODE, most=max_decode_steps)
        if beside is not None:
            self.scheduler.pace = Beside(beside)
        self.in_flight: deque[tuple[SchedulerOutput, list[list[int]]]] = deque()
        self.arrivals = 0

    def add(self, request: Request) -> Request:
        request.arrival = self.arrivals
        self.arrivals += 1
        self.scheduler.add_request(request)
        return request

    def end(self, requests: Iterable[Request], status: RequestStatus) -> None:
        """End unfinished requests from outside, as `EngineCore.finish` does, whatever their state."""
        for request in requests:
            was_running = request.status is RequestStatus.RUNNING
            request.finish(status)
            self.scheduler.release(request, was_running=was_running)

    def launch(self) -> SchedulerOutput:
        """Schedule a launch, or two, and let the device run it; its results are not read yet."""
        output = self.scheduler.schedule(self.rounds)
        self.scheduler.check_integrity()
        for launch in self.in_order(output):
            results = self.device.run(launch)
            if launch.requests:
                self.in_flight.append((launch, results))
        return output

    def in_order(self, output: SchedulerOutput) -> list[SchedulerOutput]:
        """What was scheduled, in the order in which the device runs it."""
        return [output] if output.then is None else [output, output.then]

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

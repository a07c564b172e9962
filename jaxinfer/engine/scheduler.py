"""The scheduler lets every request's computed tokens catch up with its known tokens, within limits.

There are no phases: a prefill, a chunk of one, a decode and a recomputation after preemption are all "some tokens of
this request". Running requests go first, so that decodes are never starved by prompts; waiting ones enter when tokens,
rows and pages are left; when pages run out the last comer is preempted and recomputed later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.request_queue import make_request_queue
from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class SchedulerLimits:
    """What a step may hold: tokens in all, rows, and how many tokens of prefills (rows of more than one token) beside
    so many decode rows in so many prefill rows, 0 if there is no such step; the policy; and how many decode steps may
    run in one launch."""

    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_room: Callable[[int, int], int]
    scheduling_policy: str = "fcfs"
    max_decode_steps: int = 1


@dataclass(frozen=True)
class NewRequestData:
    """A request that is scheduled for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    page_ids: list[int]
    num_computed_tokens: int


@dataclass(frozen=True)
class CachedRequestData:
    """Requests that were scheduled before: their state is known, only what changed is said. Lists run in parallel."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)  # recomputed after preemption: page_ids is the whole list
    new_page_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls()


@dataclass(frozen=True)
class SchedulerOutput:
    """One launch's decisions. The lists up to `new_pages` run in parallel; what is said of them in other words for
    observers is made when it is asked for, because a launch with hundreds of rows has no time to spare."""

    requests: list[Request]
    num_tokens: list[int]  # to compute
    num_computed: list[int]  # computed before this launch
    num_known: list[int]  # known before this launch, tokens in flight included
    samples: list[bool]  # whether the row's known tokens are all computed then, so that a new one is sampled
    epochs: list[int]  # of the requests, at this launch
    new_pages: list[list[int]]  # that the requests got for this launch
    num_steps: int  # 1, or the steps of a decode loop
    first_scheduled: set[str]
    resumed: set[str]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    total_num_scheduled_tokens: int

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {r.request_id: n for r, n in zip(self.requests, self.num_tokens, strict=True)}

    @property
    def scheduled_new_reqs(self) -> list[NewRequestData]:
        return [
            NewRequestData(r.request_id, r.prompt_token_ids, r.sampling_params, pages, computed)
            for r, pages, computed in zip(self.requests, self.new_pages, self.num_computed, strict=True)
            if r.request_id in self.first_scheduled
        ]

    @property
    def scheduled_cached_reqs(self) -> CachedRequestData:
        rows = [
            (r.request_id, pages, computed, known - r.num_prompt_tokens)
            for r, pages, computed, known in zip(
                self.requests, self.new_pages, self.num_computed, self.num_known, strict=True
            )
            if r.request_id not in self.first_scheduled
        ]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
        return CachedRequestData(columns[0], self.resumed, columns[1], columns[2], columns[3])


class Landing(NamedTuple):
    """Tokens that came back for a request: `request.token_ids[first:last]`, from entry `index` of their launch."""

    request: Request
    index: int
    first: int
    last: int


_NO_PAGES: list[int] = []  # shared: most rows of most launches get none


class Scheduler:
    """Decides what the next step computes; owns the waiting queue and the running list."""

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager) -> None:
        self.limits = limits
        self.kv = kv
        self.waiting = make_request_queue(limits.scheduling_policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        self.num_preemptions = 0
        self.num_adjusting_by_output = 0  # running requests whose latest token must land before the next launch

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, or the whole pool could not hold it.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        if request.max_total_tokens > self.kv.num_slots:
            raise ValueError(
                f"request {request.request_id!r} may grow to {request.max_total_tokens} tokens, the KV pool holds "
                f"{self.kv.num_slots}: raise kv_cache_tokens or lower max_tokens"
            )
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> SchedulerOutput:
        """Choose tokens for the next step and take the pages they need."""
        plan = _Plan(self.limits)
        self._schedule_running(plan)
        # Only now, because until here a request could still lose its place in the launch that fills its pages.
        for request, count in zip(plan.requests, plan.counts, strict=True):
            if count > 1:
                self.kv.publish(request, request.num_computed_tokens + count)
        if not plan.preempted:
            self._schedule_waiting(plan)
        num_steps = self._decode_steps(plan)
        samples = []
        for request, count, computed, known in zip(plan.requests, plan.counts, plan.computed, plan.known, strict=True):
            complete = computed + count == known
            samples.append(complete)
            request.num_computed_tokens = computed + count + num_steps - 1
            if complete:
                request.num_in_flight += num_steps
        finished, self.finished_req_ids = self.finished_req_ids, set()
        return SchedulerOutput(
            requests=plan.requests,
            num_tokens=plan.counts,
            num_computed=plan.computed,
            num_known=plan.known,
            samples=samples,
            epochs=[request.epoch for request in plan.requests],
            new_pages=plan.new_pages,
            num_steps=num_steps,
            first_scheduled=plan.first_scheduled,
            resumed=plan.resumed,
            finished_req_ids=finished,
            preempted_req_ids={request.request_id for request in plan.preempted},
            total_num_scheduled_tokens=self.limits.max_num_batched_tokens - plan.budget,
        )

    def _decode_steps(self, plan: _Plan) -> int:
        """How many steps one launch may run: more than one if all rows decode and nobody needs the host in between.

        Takes the pages for all of them; with too few free pages there are fewer steps.
        """
        limit = self.limits.max_decode_steps
        if limit == 1 or not plan.requests or len(self.waiting):
            return 1
        for request in self.running:
            known = request.num_known_tokens
            left = request.max_total_tokens - known
            if left == 0:
                continue  # its last token is in flight: it takes no part any more
            decodes = known - request.num_computed_tokens == 1
            if not decodes or request.needs_host or request.adjusts_logits(known - request.num_prompt_tokens):
                return 1
            limit = min(limit, left)
        while limit > 1:
            wanted = [known + limit - 1 for known in plan.known]
            if sum(map(self.kv.missing_pages, plan.requests, wanted)) <= self.kv.num_available:
                for index, request in enumerate(plan.requests):
                    pages = self.kv.grow(request, wanted[index])
                    if pages:
                        plan.new_pages[index] = plan.new_pages[index] + pages
                return limit
            limit //= 2
        return 1

    def _schedule_running(self, plan: _Plan) -> None:
        page_size, running = self.kv.page_size, RequestStatus.RUNNING
        for request in list(self.running):  # preemption changes the list
            if plan.budget == 0:
                break
            if request.status is not running:
                continue  # it was preempted to make room
            known = len(request.token_ids) + request.num_in_flight
            count = plan.tokens_for(request, known)
            if count == 0:
                continue
            needed = request.num_computed_tokens + count
            if needed <= len(request.pages) * page_size:
                plan.add(request, count, known, _NO_PAGES)
            elif (new_pages := self._take_pages(request, needed, plan)) is not None:
                plan.add(request, count, known, new_pages)

    def _take_pages(self, request: Request, num_tokens: int, plan: _Plan) -> list[int] | None:
        """Pages so that `num_tokens` fit, preempting last comers while there are too few; None: it was preempted."""
        while (pages := self.kv.grow(request, num_tokens)) is None:
            victim = self._victim()
            self._preempt(victim, plan)
            if victim is request:
                return None
        return pages

    def _victim(self) -> Request:
        if self.limits.scheduling_policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return self.running[-1]

    def _preempt(self, victim: Request, plan: _Plan) -> None:
        self.running.remove(victim)
        plan.remove(victim)
        self.kv.release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_in_flight = 0  # what is in flight is dropped when it lands, and sampled again
        victim.epoch += 1
        self.num_adjusting_by_output -= victim.adjusts_by_output
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.prepend_request(victim)

    def _schedule_waiting(self, plan: _Plan) -> None:
        while len(self.waiting) and plan.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            if self.kv.num_available == 0:
                break  # whatever is cached of it, a request needs a page to itself
            request = self.waiting.peek_request()
            known = request.num_known_tokens
            self.kv.find_prefix(request)
            count = plan.tokens_for(request, known)
            if count == 0 or self.kv.grow(request, request.num_computed_tokens + count) is None:
                self.kv.forgo_prefix(request)
                break
            self.waiting.pop_request()
            resumed = request.status is RequestStatus.PREEMPTED
            request.status = RequestStatus.RUNNING
            self.num_adjusting_by_output += request.adjusts_by_output
            self.running.append(request)
            plan.add(request, count, known, list(request.pages))
            self.kv.publish(request, request.num_computed_tokens + count)
            if resumed:
                plan.resumed.add(request.request_id)
            else:
                request.metrics.first_scheduled_time = time.perf_counter()
                request.num_cached_tokens = request.num_computed_tokens
                plan.first_scheduled.add(request.request_id)

    def update_from_output(self, output: SchedulerOutput, sampled: Sequence[Sequence[int]]) -> list[Landing]:
        """Take a launch's results: append sampled tokens, release what finished.

        Args:
            sampled: for each of `output.requests` its tokens, one for each step that ran; only read where
                `output.samples` says so.
        """
        landings: list[Landing] = []
        ended: list[Request] = []
        num_steps, running = output.num_steps, RequestStatus.RUNNING
        page_size = self.kv.page_size if self.kv.cache is not None else sys.maxsize
        rows = zip(output.requests, output.samples, output.epochs, sampled, strict=True)
        for index, (request, samples, epoch, tokens) in enumerate(rows):
            if not samples or request.epoch != epoch or request.status is not running:
                continue  # a chunk of a prompt; or preempted, aborted or finished since the launch
            request.num_in_flight -= num_steps
            first = len(request.token_ids)
            status = request.extend(tokens)
            if status is not None:
                request.status = status
                ended.append(request)
            last = len(request.token_ids)
            landings.append(Landing(request, index, first, last))
            if last - 1 - request.num_published_tokens >= page_size:
                self.kv.publish(request, last - 1)
        self._forget(ended)
        return landings

    def finish_requests(self, requests: Sequence[Request], status: RequestStatus) -> None:
        """End requests from outside (a stop string, an abort, an error), wherever they stand."""
        for request in requests:
            if request.is_finished:
                raise ValueError(f"request {request.request_id!r} is finished already ({request.status.value})")
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove_request(request)
            request.status = status
        self._forget(requests)

    def _forget(self, ended: Sequence[Request]) -> None:
        if not ended:
            return
        for request in ended:
            request.num_in_flight = 0
            self.num_adjusting_by_output -= request.adjusts_by_output and bool(request.pages)
            request.metrics.finished_time = time.perf_counter()
            self.kv.release(request)
            self.finished_req_ids.add(request.request_id)
            del self.requests[request.request_id]
        self.running = [request for request in self.running if not request.is_finished]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or held by exactly one running request."""
        self.kv.check_integrity(self.running)
        for request in self.waiting:
            assert not request.pages, "a waiting request holds pages"


class _Plan:
    """A launch in the making; lists run in parallel."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = limits.max_num_batched_tokens
        self.prefill_room = limits.prefill_room
        self.decode_rows = self.prefill_rows = self.prefill_tokens = 0
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.computed: list[int] = []
        self.known: list[int] = []
        self.new_pages: list[list[int]] = []
        self.first_scheduled: set[str] = set()
        self.resumed: set[str] = set()
        self.preempted: list[Request] = []

    def tokens_for(self, request: Request, known: int) -> int:
        """How many of its `known` tokens the request may compute in this step."""
        if known >= request.max_total_tokens:
            return 0  # its last token is in flight
        count = min(known - request.num_computed_tokens, self.budget)
        if count > 1:
            room = self.prefill_room(self.decode_rows, self.prefill_rows + 1) - self.prefill_tokens
            return min(count, room) if room > 1 else 0
        if self.prefill_tokens and self.prefill_tokens > self.prefill_room(self.decode_rows + 1, self.prefill_rows):
            return 0
        return count

    def add(self, request: Request, count: int, known: int, new_pages: list[int]) -> None:
        self.requests.append(request)
        self.counts.append(count)
        self.computed.append(request.num_computed_tokens)
        self.known.append(known)
        self.new_pages.append(new_pages)
        self._count(count, 1)

    def remove(self, victim: Request) -> None:
        """A preempted request leaves the plan, if it was in it already, and its tokens return to the budget."""
        self.preempted.append(victim)
        if victim in self.requests:
            index = self.requests.index(victim)
            self._count(self.counts[index], -1)
            for column in (self.requests, self.counts, self.computed, self.known, self.new_pages):
                del column[index]

    def _count(self, tokens: int, rows: int) -> None:
        """Take a row of so many tokens in (rows=1) or out (rows=-1)."""
        self.budget -= rows * tokens
        if tokens > 1:
            self.prefill_rows += rows
            self.prefill_tokens += rows * tokens
        else:
            self.decode_rows += rows

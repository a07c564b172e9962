"""The scheduler lets every request's computed tokens catch up with its known tokens, within limits.

There are no phases: a prefill, a chunk of one, a decode and a recomputation after preemption are all "some tokens of
this request". Running requests go first, so that decodes are never starved by prompts; waiting ones enter when tokens,
rows and pages are left; when pages run out, the latest request is preempted and recomputed later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jaxinfer.constraints.guard import Walk
from jaxinfer.scheduling.group import Group
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.landing import DraftsOf, LogprobsOf, land
from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.pace import Pace
from jaxinfer.scheduling.plan_rounds import plan_launches
from jaxinfer.scheduling.preemption import victim_among
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import ONE_STEP, Rounds, all_await
from jaxinfer.scheduling.scheduler_output import (
    CachedRequestData,
    Continuation,
    Landing,
    NewRequestData,
    SchedulerLimits,
    SchedulerOutput,
)
from jaxinfer.scheduling.trunks import Trunks
from jaxinfer.scheduling.turning import turn_if_due, turns
from jaxinfer.scheduling.waiting_room import WaitingRoom

__all__ = ["CachedRequestData", "Landing", "NewRequestData", "Scheduler", "SchedulerLimits", "SchedulerOutput"]

_NO_PAGES: list[int] = []  # shared: most rows of most launches get none


class Scheduler:
    """Decides what the next step computes; owns the waiting queue and the running list."""

    lands_again = False  # whether a request that starts over lands its tokens again

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager) -> None:
        self.limits = limits
        self.kv = kv
        self.waiting = WaitingRoom(limits.scheduling_policy)
        self.running: list[Request] = []
        self.trunks = Trunks(kv)
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        self.num_preemptions = 0
        self._forks: set[Request] = set()  # forked requests that run and have not taken their seats yet
        self.num_sharing_lanes = 0  # running requests whose launches of rounds read a trunk together
        self._had_chunks = False  # whether the latest launches had chunks of prompts
        self.turned: list[Request] = []  # requests that have left their seats since the last launch, to start over
        self.pace = Pace()  # of launches, which the caller that runs them measures

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that could never run. Changes nothing."""
        if request.max_total_tokens > self.kv.num_slots:
            raise ValueError(
                f"request {request.request_id!r} may grow to {request.max_total_tokens} tokens, the KV pool holds "
                f"{self.kv.num_slots}: raise kv_cache_tokens or lower max_tokens"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request; raise ValueError if its id is in use, or if the whole pool could not hold it."""
        self._register([request])
        self.waiting.add(request)

    def add_group(self, group: RequestGroup) -> None:
        """Queue as many of a group's members as may run at once; raise as `add_request`, for any member."""
        self._register(group.order)
        for member in group.order[: group.max_parallel]:
            self.waiting.add(member)
        group.pending.extend(group.order[group.max_parallel :])

    def _register(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self.requests:
                raise ValueError(f"request_id {request.request_id!r} is in use")
            self.check(request)
        self.requests.update((request.request_id, request) for request in requests)

    def steer(self, request: Request, token: int) -> None:
        """Let a held request continue, with `token` in place of its latest token."""
        request.steer(token)
        self.waiting.steered(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self, rounds: Rounds = ONE_STEP) -> SchedulerOutput:
        """Choose tokens for the next launch, or the next two (see `SchedulerOutput.then`), and take their pages.

        Args:
            rounds: the rounds that a launch of seated rows may run.
        """
        plan = LaunchPlan(self.limits, rounds)
        self._schedule_running(plan)
        # Only now, because until here a request could still be preempted from the launch that fills its pages.
        if plan.prefill_rows:
            for request, is_chunk, count in zip(plan.requests, plan.are_chunks, plan.counts, strict=True):
                if is_chunk:
                    self.kv.publish(request, request.num_computed_tokens + count)
        if not plan.preempted:
            self._schedule_waiting(plan)
        waits, shares_lanes = len(self.waiting) > 0, self.num_sharing_lanes > 1
        plans = plan_launches(
            plan, rounds, self.kv, self.running, self.pace, waits=waits, shares_lanes=shares_lanes,
            goes_on=self._had_chunks,
        )  # fmt: skip
        self._had_chunks = plan.prefill_rows > 0
        left, self.turned = [*plan.preempted, *self.turned], []
        finished, self.finished_req_ids = self.finished_req_ids, set()  # trunks still need their seats in this launch
        outputs = [
            part.commit(way, rounds_of, self.kv.num_in_chunks, shares_lanes=shares_lanes)
            for part, way, rounds_of in plans
        ]
        for trunk in plan.trunks_computed:
            self._leave_seat(trunk)
        first, *others = outputs
        if not (finished or left or others):
            return first  # as most are
        return replace(
            first, finished_req_ids=finished, preempted_req_ids={request.request_id for request in left},
            then=others[0] if others else None,
        )  # fmt: skip

    def awaits_tokens(self, rounds: Rounds) -> bool:
        """Whether each request that may take part in a launch needs the host after every token.

        Then what is in flight is landed before the next launch. The requests that are ready would else be launched
        without those in flight, and never again together with them: twice as many launches for as many tokens.
        """
        if len(self.waiting) and len(self.running) < self.limits.max_num_seqs:
            return False
        return all_await(self.running, rounds)

    def _schedule_running(self, plan: LaunchPlan) -> None:
        page_size, running = self.kv.page_size, RequestStatus.RUNNING
        for request in list(self.running):  # preemption changes the list
            if plan.budget == 0:
                break
            if request.status is not running:
                continue  # it was preempted to make room
            known = len(request.token_ids) + request.num_in_flight
            if request.in_seat or plan.has_only_its_last(request):
                if not plan.takes_seated(request):
                    continue
                if not request.in_seat:
                    plan.enter(request)
                if known > request.max_total_tokens:
                    known = request.max_total_tokens
                needed, count = plan.slots_of_seated(request, known), 1
            else:
                count = plan.tokens_of_chunk(request, known)
                if count == 0:
                    continue
                needed = request.num_computed_tokens + count
            new_pages = _NO_PAGES
            if needed > len(request.pages) * page_size:
                new_pages = self._take_pages(request, needed, plan)
                if new_pages is None:
                    continue
            if self._forks and request in self._forks:
                self._forks.remove(request)
                new_pages = list(request.pages)
                plan.first_scheduled.add(request.request_id)
            plan.add(request, count, known, new_pages)

    def _take_pages(self, request: Request, num_tokens: int, plan: LaunchPlan) -> list[int] | None:
        """Take pages so that `num_tokens` fit, preempting requests while pages are too few; None: it was preempted."""
        while (pages := self.kv.grow(request, num_tokens)) is None:
            if self.trunks.give_up_idle(request):
                continue
            victim = victim_among(self.running, self.limits.scheduling_policy)
            self._preempt(victim, plan)
            if victim is request:
                return None
        return pages

    def _preempt(self, victim: Request, plan: LaunchPlan) -> None:
        plan.remove(victim)
        self.num_preemptions += 1
        victim.metrics.num_preemptions += not victim.is_trunk
        self.put_back(victim)

    def put_back(self, victim: Request) -> None:
        """Take a request out of its seat and its pages, to be computed again from its tokens."""
        self.running.remove(victim)
        self._forks.discard(victim)
        self.kv.release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.leave_seat()  # what is in flight is sampled again
        victim.drop_awaited()
        victim.marks.cut(victim.num_output_tokens)  # a block of a diffusion model is begun again
        victim.epoch += 1
        if victim.is_trunk:
            victim.is_computed = False  # a member that begins with it has it computed again
            return
        self._count_running(victim, -1)
        turn_if_due(victim)
        self.waiting.add(victim, first=True)

    def _park_held(self, plan: LaunchPlan) -> bool:
        """Preempt the latest held request if all running requests are held; False: none was preempted.

        It keeps the token that has landed for it. At the head of the queue it would block the request for which the
        room is made, so it waits beside the queue for its search.
        """
        if not self.running or not all([request.is_held for request in self.running]):
            return False
        self._preempt(self.running[-1], plan)
        return True

    def _count_running(self, request: Request, change: int) -> None:
        self.num_sharing_lanes += change * request.shares_lane
        if request.group is not None and request.trunk is not None:
            request.group.num_running += change

    def _schedule_waiting(self, plan: LaunchPlan) -> None:
        while len(self.waiting) and plan.budget > 0:
            if len(self.running) >= self.limits.max_num_seqs:
                if not self._park_held(plan):
                    break
                continue
            request = self.waiting.peek_request()
            # Even with a cached prefix, a request that computes something needs a page to itself.
            if self.kv.num_available == 0 and not self.trunks.give_up_idle(request):
                if not self._park_held(plan):
                    break
                continue
            trunk = request.trunk
            if trunk is not None and not trunk.is_computed:
                if trunk in self.running:
                    break
                admitted = self._admit(trunk, plan)
            else:
                admitted = self._admit(request, plan)
                if admitted:
                    self.waiting.pop_request()
            if not admitted and not self._park_held(plan):
                break

    def _admit(self, request: Request, plan: LaunchPlan) -> bool:
        """Let a request run, with as many of its tokens as fit into this launch; False: it has to wait."""
        known = request.num_known_tokens
        self.kv.find_prefix(request)
        computed = request.num_computed_tokens
        is_cached = request.is_trunk and computed == known
        # A prompt whose whole blocks are all cached has nothing to compute.
        decodes = plan.has_only_its_last(request)
        is_seated = decodes or (not request.is_trunk and computed == self.kv.num_in_chunks(known))
        count = int(plan.takes_seated(request)) if is_seated else plan.tokens_of_chunk(request, known)
        needed = plan.slots_of_seated(request, known) if is_seated else computed + count
        while not is_cached and (not count or self.kv.grow(request, needed) is None):
            if not count or not self.trunks.give_up_idle(request):
                self.kv.forgo_prefix(request)
                return False
        resumed = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        if request.group is not None:
            request.group.has_begun = True
        if not resumed:
            request.metrics.first_scheduled_time = time.perf_counter()
            request.num_cached_tokens = request.num_computed_tokens
        if is_cached:
            request.is_computed = True
            self.trunks.keep(request)
            return True
        if not request.is_trunk:
            self._count_running(request, 1)
        self.running.append(request)
        request.in_seat = is_seated and not decodes
        if decodes:
            plan.enter(request)
        plan.add(request, count, known, list(request.pages))
        self.kv.publish(request, computed if is_seated else computed + count)
        (plan.resumed if resumed else plan.first_scheduled).add(request.request_id)
        return True

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]]:
        """Let `child`, whose tokens are known, continue from what `parent`, of its group, has computed. If there is no
        seat or no page for it, it waits and computes its own.

        Returns:
            Source and destination slots of what has to be copied before the next launch.
        """
        group = child.group
        assert group is not None
        group.num_unfinished += 1
        self._register([child])
        moves = None
        if parent.pages and len(self.running) < self.limits.max_num_seqs:
            moves = self.kv.fork(parent, child)
        if moves is None:
            self.waiting.add(child, first=True)
            return []
        child.status = RequestStatus.RUNNING
        self._count_running(child, 1)
        self.running.append(child)
        self._forks.add(child)
        return moves

    def update_from_output(
        self,
        output: SchedulerOutput,
        sampled: Sequence[Sequence[int]],
        logprobs_of: LogprobsOf | None = None,
        before: Callable[[Request], None] | None = None,
        walks: Mapping[int, Walk | None] | None = None,
        drafts_of: DraftsOf | None = None,
    ) -> list[Landing]:
        """Land the sampled tokens of a launch, see `land`, and release the requests that finish."""
        landings, ended, turned = list[Landing](), list[Request](), list[Request]()
        page_size = self.kv.page_size if self.kv.cache is not None else sys.maxsize
        num_settled = self.kv.num_settled
        for landing in land(output, sampled, logprobs_of, before, walks, drafts_of):
            request = landing.request
            if request.status.is_finished:
                ended.append(request)
            if not request.is_walked:
                request.num_computed_tokens = num_settled(landing.last)
            computed = request.num_computed_tokens
            landings.append(landing)
            if computed - request.num_published_tokens >= page_size and not request.has_twin:
                self.kv.publish(request, computed)
            if request.later_total_tokens and turns(request):
                turned.append(request)
        self._forget(ended)
        for request in turned:
            self.put_back(request)
        self.turned += turned
        return landings

    def continue_from(self, continuations: Sequence[Continuation]) -> None:
        """Apply what a strategy says of running requests whose tokens have landed."""
        for request, num_computed, in_seat in continuations:
            request.num_computed_tokens, request.in_seat = num_computed, in_seat

    def release(self, request: Request, *, was_running: bool) -> None:
        """Release what a request that was ended from outside holds: its place in a queue, its pages and its seat."""
        if not was_running:
            group = request.group
            if group is not None and request in group.pending:
                group.pending.remove(request)
            else:
                self.waiting.remove(request)
        self._forget([request])

    def _forget(self, ended: Sequence[Request]) -> None:
        if not ended:
            return
        for request in ended:
            if request.pages:
                self._count_running(request, -1)
            self._forks.discard(request)
            request.leave_seat()
            request.metrics.finished_time = time.perf_counter()
            (self.kv.discard if request.status is RequestStatus.FINISHED_ERROR else self.kv.release)(request)
            self.finished_req_ids.add(request.request_id)
            del self.requests[request.request_id]
            if request.group is not None:
                self._member_ended(request.group)
        self.running = [request for request in self.running if not request.is_finished]

    def _member_ended(self, group: Group[Request]) -> None:
        """Queue the next member of the group, if the ended one had a place; after the last one, release the trunk."""
        group.num_unfinished -= 1
        if group.pending and group.num_unfinished - len(group.pending) < group.max_parallel:
            self.waiting.add(group.pending.popleft(), first=True)
        trunk = group.trunk
        if group.num_unfinished or trunk is None:
            return
        if trunk in self.running:
            self._leave_seat(trunk)
        if trunk in self.trunks.held:
            self.trunks.release(trunk)

    def _leave_seat(self, trunk: Request) -> None:
        """Take a trunk out of its seat: it is planned to the end, or no member needs it any more."""
        self.running.remove(trunk)
        self.finished_req_ids.add(trunk.request_id)
        self.trunks.keep(trunk)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free, cached, or held by running requests or trunks as counted."""
        self.kv.check_integrity([*self.running, *self.trunks.held])
        self.waiting.check_integrity()

"""The scheduler of bidirectional models: a sequence has all of its tokens from the start."""

from __future__ import annotations

import time
from dataclasses import replace

from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import ONE_STEP, Rounds
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import SchedulerOutput


class WholeScheduler(Scheduler):
    """Scheduler of requests that get all of their pages when they are admitted, and are never preempted.

    Nothing is cached for other requests, because tokens depend on those after them. Every launch is of rounds. Once a
    request's tokens have landed, the strategy says where it continues: with a window, if it is in its seat, or with a
    chunk from its computed tokens to its end.
    """

    lands_again = True  # a sequence begins again at its prompt, because its rounds depend on all rounds before

    def check(self, request: Request) -> None:
        most = self.limits.prefill_room(0, 1)
        if request.max_total_tokens > most:
            raise ValueError(
                f"request {request.request_id!r} may grow to {request.max_total_tokens} tokens, and a bidirectional "
                f"model computes them all at once, at most {most} with max_num_batched_tokens="
                f"{self.limits.max_num_batched_tokens}: raise that or lower max_tokens"
            )
        super().check(request)

    def add_group(self, group: RequestGroup) -> None:
        group.share_nothing()
        super().add_group(group)

    def schedule(self, rounds: Rounds = ONE_STEP) -> SchedulerOutput:
        plan = LaunchPlan(self.limits, rounds)
        # Chunks first: windows fit in beside nearly everything, and a request has a window after its chunk.
        for request in [each for each in self.running if not each.in_seat]:
            self._add_chunk(plan, request)
        self._admit_waiting(plan)
        for request in [each for each in self.running if each.in_seat]:
            if plan.takes_seated(request):
                plan.add(request, 1, request.max_total_tokens, [])
        finished, self.finished_req_ids = self.finished_req_ids, set()
        number = 1 if plan.prefill_rows else rounds.most
        most = [rounds.most_tokens] * len(plan.requests)
        for request, tokens in zip(plan.requests, most, strict=True):
            request.num_in_flight += tokens
        count = len(plan.requests)
        output = plan.output(rounds, [number] * count, most, [0] * count, seated=rounds.kind, shares_lanes=False)
        return replace(output, finished_req_ids=finished)

    def _add_chunk(self, plan: LaunchPlan, request: Request) -> bool:
        """Let a request compute everything after its computed tokens, if this launch has room for it."""
        count = request.max_total_tokens - request.num_computed_tokens
        if plan.tokens_of_chunk(request, request.max_total_tokens) < count:
            return False
        is_new = request.request_id in plan.first_scheduled
        plan.add(request, count, request.max_total_tokens, list(request.pages) if is_new else [])
        return True

    def _admit_waiting(self, plan: LaunchPlan) -> None:
        while len(self.waiting) and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting.peek_request()
            total = request.max_total_tokens
            if plan.tokens_of_chunk(request, total) < total or self.kv.grow(request, total) is None:
                break
            self.waiting.pop_request()
            request.status = RequestStatus.RUNNING
            if request.group is not None:
                request.group.has_begun = True
            request.metrics.first_scheduled_time = time.perf_counter()
            self._count_running(request, 1)
            self.running.append(request)
            plan.first_scheduled.add(request.request_id)
            self._add_chunk(plan, request)

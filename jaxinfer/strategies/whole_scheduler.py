"""The scheduler of bidirectional models: a sequence is all there from the start, and a round may compute all of it."""

from __future__ import annotations

import time

from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import ONE_STEP, Rounds, RowKind
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import SchedulerLimits, SchedulerOutput


class WholeScheduler(Scheduler):
    """A request gets the pages of all that it may come to be when it is admitted, and is never preempted. Nothing of it
    is cached for others: what its tokens are depends on tokens behind them.

    Every launch is of rounds. Whoever drives it says of each running request what comes next, once its tokens have
    landed: a window, if it is in its seat, or a chunk of its canvas from its computed tokens to its end.

    Args:
        mask_token_id: what stands on a canvas where no token is yet.
    """

    lands_again = True  # a canvas begins again at its prompt, as its rounds depend on all rounds before

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, mask_token_id: int) -> None:
        super().__init__(limits, kv)
        self.mask_token_id = mask_token_id

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
        # Chunks first: windows fit in beside nearly everything, and whoever has a chunk computed comes with a window.
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
        return SchedulerOutput(
            requests=plan.requests,
            kinds=[RowKind.BLOCK if kind is RowKind.DECODE else kind for kind in plan.kinds],
            num_tokens=plan.counts,
            num_computed=plan.computed,
            num_known=plan.known,
            most_tokens=most,
            least_tokens=[0] * len(plan.requests),
            epochs=[request.epoch for request in plan.requests],
            new_pages=plan.new_pages,
            rounds_of=[number] * len(plan.requests),
            rounds=rounds,
            shares_lanes=False,
            enters=set(),
            first_scheduled=plan.first_scheduled,
            resumed=set(),
            finished_req_ids=finished,
            total_num_scheduled_tokens=self.limits.max_num_batched_tokens - plan.budget,
        )

    def _add_chunk(self, plan: LaunchPlan, request: Request) -> bool:
        """Let a request compute all from its computed tokens on, if there is room for it in this launch."""
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
            request.metrics.first_scheduled_time = time.perf_counter()
            masks = [self.mask_token_id] * (total - request.num_prompt_tokens)
            request.canvas = [*request.prompt_token_ids, *masks]
            self._count_running(request, 1)
            self.running.append(request)
            plan.first_scheduled.add(request.request_id)
            self._add_chunk(plan, request)


class WindowRounds(Rounds):
    """Rounds of windows around blocks, which land a block of `most_tokens` at most in a launch."""

    @property
    def takes_prompts(self) -> bool:
        return True

    def most_in(self, rounds: int) -> int:
        return self.most_tokens

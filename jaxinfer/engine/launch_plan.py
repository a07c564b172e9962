"""A launch in the making: which requests take part, with how many tokens, within the limits."""

from __future__ import annotations

from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler_output import SchedulerLimits
from jaxinfer.engine.strategy import RowKind


class LaunchPlan:
    """Lists run in parallel, a row each."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = limits.max_num_batched_tokens
        self.prefill_room = limits.prefill_room
        self.decode_rows = self.prefill_rows = self.prefill_tokens = 0
        self.requests: list[Request] = []
        self.kinds: list[RowKind] = []
        self.counts: list[int] = []
        self.computed: list[int] = []
        self.known: list[int] = []
        self.new_pages: list[list[int]] = []
        self.first_scheduled: set[str] = set()
        self.resumed: set[str] = set()
        self.preempted: list[Request] = []

    def tokens_for(self, request: Request, known: int) -> int:
        """How many of its `known` tokens the request may compute in this step."""
        if request.in_seat:
            if request.num_tokens_left <= 0 or self.budget == 0:
                return 0  # its last token is in flight
            fits = not self.prefill_tokens or self.prefill_tokens <= self.prefill_room(
                self.decode_rows + 1, self.prefill_rows
            )
            return int(fits)
        room = self.prefill_room(self.decode_rows, self.prefill_rows + 1) - self.prefill_tokens
        return max(0, min(known - request.num_computed_tokens, self.budget, room))

    def add(self, request: Request, count: int, known: int, new_pages: list[int]) -> None:
        kind = RowKind.DECODE if request.in_seat else RowKind.PROMPT_CHUNK
        self.requests.append(request)
        self.kinds.append(kind)
        self.counts.append(count)
        self.computed.append(known - 1 if request.in_seat else request.num_computed_tokens)
        self.known.append(known)
        self.new_pages.append(new_pages)
        self._count(kind, count, 1)

    def remove(self, victim: Request) -> None:
        """A preempted request leaves the plan, if it was in it already, and its tokens return to the budget."""
        self.preempted.append(victim)
        if victim in self.requests:
            index = self.requests.index(victim)
            self._count(self.kinds[index], self.counts[index], -1)
            for column in (self.requests, self.kinds, self.counts, self.computed, self.known, self.new_pages):
                del column[index]

    def _count(self, kind: RowKind, tokens: int, rows: int) -> None:
        """Take a row of so many tokens in (rows=1) or out (rows=-1)."""
        self.budget -= rows * tokens
        if kind is RowKind.PROMPT_CHUNK:
            self.prefill_rows += rows
            self.prefill_tokens += rows * tokens
        else:
            self.decode_rows += rows

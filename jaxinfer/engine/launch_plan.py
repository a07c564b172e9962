"""A launch in the making: which requests take part, with how many tokens, within the limits."""

from __future__ import annotations

from collections.abc import Hashable

from jaxinfer.engine.request import Request
from jaxinfer.engine.rounds import RowKind
from jaxinfer.engine.scheduler_output import SchedulerLimits


class LaunchPlan:
    """Lists run in parallel, a row each."""

    def __init__(self, limits: SchedulerLimits, sits_out: frozenset[Hashable] = frozenset()) -> None:
        self._sits_out = sits_out
        self.budget = limits.max_num_batched_tokens
        self.prefill_room = limits.prefill_room
        self.block_size = limits.block_size
        self.decode_rows = self.prefill_rows = self.prefill_tokens = 0
        self.requests: list[Request] = []
        self.kinds: list[RowKind] = []
        self.counts: list[int] = []
        self.computed: list[int] = []
        self.known: list[int] = []
        self.new_pages: list[list[int]] = []
        self.enters: set[str] = set()  # requests whose latest tokens enter their seats
        self.first_scheduled: set[str] = set()
        self.resumed: set[str] = set()
        self.preempted: list[Request] = []

    def takes_seated(self, request: Request) -> bool:
        """Whether a request that is in its seat, or may enter it, takes part: its last token is not in flight, nor one
        that has to land before the next is drawn, and there is room."""
        if request.num_in_flight and (request.depends_on_output or request in self._sits_out):
            return False
        if len(request.token_ids) + request.num_sure_in_flight >= request.max_total_tokens or self.budget == 0:
            return False
        tokens = self.prefill_tokens
        return not tokens or tokens <= self.prefill_room(self.decode_rows + 1, self.prefill_rows)

    def has_only_its_last(self, request: Request) -> bool:
        """Whether only the latest token is left to compute of a request that is not in its seat: it decodes at once."""
        if self.block_size > 1 or request.is_trunk or request.is_held:
            return False
        return request.num_computed_tokens == request.num_tokens - 1

    def enter(self, request: Request) -> None:
        """Have the latest tokens of a request enter its seat, if it is not there."""
        if not request.in_seat:
            request.in_seat = True
            self.enters.add(request.request_id)

    def tokens_of_chunk(self, request: Request, known: int) -> int:
        """How many of its `known` tokens the request may compute in this step."""
        if request.is_held:
            return 0
        room = self.prefill_room(self.decode_rows, self.prefill_rows + 1) - self.prefill_tokens
        count = max(0, min(known - request.num_computed_tokens, self.budget, room))
        return count // self.block_size * self.block_size

    def add(self, request: Request, count: int, known: int, new_pages: list[int]) -> None:
        self.requests.append(request)
        self.counts.append(count)
        self.known.append(known)
        self.new_pages.append(new_pages)
        self.budget -= count
        if request.in_seat:
            self.kinds.append(RowKind.DECODE)
            self.computed.append(known - 1)
            self.decode_rows += 1
        else:
            self.kinds.append(RowKind.PROMPT_CHUNK)
            self.computed.append(request.num_computed_tokens)
            self.prefill_rows += 1
            self.prefill_tokens += count
            request.is_computed = request.is_trunk and request.num_computed_tokens + count == known

    def kinds_in(self, seated: RowKind) -> list[RowKind]:
        """What the rows do if those in their seats do what is said."""
        if not self.prefill_rows:
            return [seated] * len(self.kinds)
        return [kind if kind is RowKind.PROMPT_CHUNK else seated for kind in self.kinds]

    def remove(self, victim: Request) -> None:
        """A preempted request leaves the plan, if it was in it already, and its tokens return to the budget."""
        self.preempted.append(victim)
        if victim in self.requests:
            index = self.requests.index(victim)
            self.budget += self.counts[index]
            if self.kinds[index] is RowKind.PROMPT_CHUNK:
                self.prefill_rows -= 1
                self.prefill_tokens -= self.counts[index]
            else:
                self.decode_rows -= 1
            for column in (self.requests, self.kinds, self.counts, self.computed, self.known, self.new_pages):
                del column[index]

"""A launch that is being planned: which requests take part, with how many tokens, within the limits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import ONE_STEP, Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerLimits, SchedulerOutput

# Launches of a request whose tokens may wait to be walked, before it waits for the walks.
_MOST_WALKING = 2


class LaunchPlan:
    """The rows of a launch, in parallel lists.

    Args:
        rounds: the rounds that a launch of its seated rows may run.
    """

    def __init__(self, limits: SchedulerLimits, rounds: Rounds = ONE_STEP) -> None:
        self._limits, self.rounds = limits, rounds
        self._takes_prompts, self._sits_out = rounds.takes_prompts, rounds.sits_out
        self.budget = limits.max_num_batched_tokens
        self.prefill_room = limits.prefill_room
        self.block_size = limits.block_size
        self.decode_rows = self.prefill_rows = self.prefill_tokens = 0
        self.requests: list[Request] = []
        self.are_chunks: list[bool] = []  # of prompts; the other rows are in their seats
        self.counts: list[int] = []
        self.computed: list[int] = []
        self.known: list[int] = []
        self.new_pages: list[list[int]] = []
        self.enters: set[str] = set()  # requests whose latest tokens enter their seats
        self.first_scheduled: set[str] = set()
        self.resumed: set[str] = set()
        self.preempted: list[Request] = []

    def takes_seated(self, request: Request) -> bool:
        """Whether a request that is in its seat, or may enter it, takes part: it has tokens left to draw, no token has
        to land before the next draw, and there is room."""
        if request.num_in_flight and (self.rounds.awaits(request) or (self._sits_out and request in self._sits_out)):
            return False
        if request.num_walking >= _MOST_WALKING:
            return False
        if len(request.token_ids) + request.num_sure_in_flight >= request.max_total_tokens or self.budget == 0:
            return False
        tokens = self.prefill_tokens
        return not tokens or tokens <= self.prefill_room(self.decode_rows + 1, self.prefill_rows)

    def slots_of_seated(self, request: Request, known: int) -> int:
        """Return how many slots a seated request needs in all for a step or a round."""
        return self.rounds.reach(known, 1, request.max_total_tokens) if self._takes_prompts else known

    def has_only_its_last(self, request: Request) -> bool:
        """Whether a request that is not in its seat has only its latest token to compute: then it decodes at once."""
        if self.block_size > 1 or request.is_trunk or request.is_held or request.scoring is not None:
            return False
        return request.num_computed_tokens == request.num_tokens - 1

    def enter(self, request: Request) -> None:
        """Let the latest tokens of a request enter its seat."""
        request.in_seat = True
        self.enters.add(request.request_id)

    def tokens_of_chunk(self, request: Request, known: int) -> int:
        """Return how many of its `known` tokens the request may compute in this step."""
        if request.is_held:
            return 0
        room = self.prefill_room(self.decode_rows, self.prefill_rows + 1) - self.prefill_tokens
        count = max(0, min(known - request.num_computed_tokens, self.budget, room))
        return count // self.block_size * self.block_size

    def add(self, request: Request, count: int, known: int, new_pages: list[int]) -> None:
        """Add a request with `count` tokens to compute; `known` is the most tokens that it may have."""
        if request.in_seat:
            self._append(request, False, count, known - 1, known, new_pages)
        else:
            self._append(request, True, count, request.num_computed_tokens, known, new_pages)
            request.is_computed = request.is_trunk and request.num_computed_tokens + count == known

    def _append(
        self, request: Request, is_chunk: bool, count: int, computed: int, known: int, new_pages: list[int]
    ) -> None:
        self.requests.append(request)
        self.are_chunks.append(is_chunk)
        self.counts.append(count)
        self.computed.append(computed)
        self.known.append(known)
        self.new_pages.append(new_pages)
        self.budget -= count
        if is_chunk:
            self.prefill_rows += 1
            self.prefill_tokens += count
        else:
            self.decode_rows += 1

    @property
    def trunks_computed(self) -> list[Request]:
        """Trunks whose last chunk is in the launch."""
        return [request for request in self.requests if request.is_computed] if self.prefill_rows else []

    def remove(self, victim: Request) -> None:
        """Note a preempted request, and if it is in the plan, remove it and return its tokens to the budget."""
        self.preempted.append(victim)
        if victim in self.requests:
            index = self.requests.index(victim)
            self.budget += self.counts[index]
            if self.are_chunks[index]:
                self.prefill_rows -= 1
                self.prefill_tokens -= self.counts[index]
            else:
                self.decode_rows -= 1
            for column in (self.requests, self.are_chunks, self.counts, self.computed, self.known, self.new_pages):
                del column[index]

    @property
    def step_kind(self) -> Hashable:
        """The key that is equal for steps that take as long as this plan's."""
        pages = max([len(request.pages) for request in self.requests])
        return self._limits.step_shape(
            decode_rows=self.decode_rows, prefill_rows=self.prefill_rows, prefill_tokens=self.prefill_tokens,
            pages_per_row=pages,
        )  # fmt: skip

    def _is_last_chunk(self, index: int, num_in_chunks: Callable[[int], int]) -> bool:
        request = self.requests[index]
        return not request.is_trunk and self.computed[index] + self.counts[index] == num_in_chunks(self.known[index])

    def leaves_chunks(self, num_in_chunks: Callable[[int], int]) -> bool:
        """Whether prompts are left for later steps; `num_in_chunks`: how many known tokens are computed as chunks."""
        return any(
            is_chunk and not self._is_last_chunk(index, num_in_chunks) for index, is_chunk in enumerate(self.are_chunks)
        )

    def split(self, num_in_chunks: Callable[[int], int]) -> tuple[LaunchPlan, LaunchPlan]:
        """Return a plan of the chunks alone, and one of the rows that run after them: seated rows, and rows that enter
        their seats by their last chunk, if they need no host after that."""
        chunks, seated = (LaunchPlan(self._limits, self.rounds) for _ in range(2))
        ending = []
        for index, (request, is_chunk) in enumerate(zip(self.requests, self.are_chunks, strict=True)):
            if not is_chunk:
                seated._take(self, index)
                continue
            chunks._take(self, index)
            if not request.draws_alone and request.num_tokens_left > 1 and self._is_last_chunk(index, num_in_chunks):
                ending.append(index)
        for index in ending:
            known = self.known[index] + 1
            seated._append(self.requests[index], False, 1, known - 1, known, [])
        return chunks, seated

    def split_constrained(self) -> tuple[LaunchPlan, LaunchPlan]:
        """Return a plan of the other rows, and one of the seated rows of requests with guards."""
        others, constrained = (LaunchPlan(self._limits, self.rounds) for _ in range(2))
        for index, (request, is_chunk) in enumerate(zip(self.requests, self.are_chunks, strict=True)):
            plan = others if is_chunk or request.guard is None else constrained
            plan._take(self, index)
        return others, constrained

    def _take(self, other: LaunchPlan, index: int) -> None:
        """Take over a row of another plan, and the notes on its request."""
        request = other.requests[index]
        self._append(
            request, other.are_chunks[index], other.counts[index], other.computed[index], other.known[index],
            other.new_pages[index],
        )  # fmt: skip
        for name in ("enters", "first_scheduled", "resumed"):
            if request.request_id in getattr(other, name):
                getattr(self, name).add(request.request_id)

    def commit(
        self, rounds: Rounds, rounds_of: Sequence[int], num_in_chunks: Callable[[int], int], *, shares_lanes: bool
    ) -> SchedulerOutput:
        """Account for the launch in its requests, and return its description.

        Args:
            rounds: the chosen rounds.
            rounds_of: how many rounds each row takes part in; empty: it is a plain step.
            num_in_chunks: returns how many of so many known tokens are computed as prompt chunks.
            shares_lanes: whether rounds may read a trunk for several rows at once.
        """
        most_all, least_all = [], []
        each = rounds if rounds_of else ONE_STEP
        landing = {turns: (each.most_in(turns), turns * each.least_tokens) for turns in {1, *rounds_of}}
        rows = zip(self.requests, self.are_chunks, rounds_of or [1] * len(self.requests), strict=True)
        for index, (request, is_chunk, turns) in enumerate(rows):
            most, least = landing[turns]
            if is_chunk:
                request.num_computed_tokens = self.computed[index] + self.counts[index]
                request.in_seat = self._is_last_chunk(index, num_in_chunks)
                most = least = int(request.in_seat and self.block_size == 1)
            elif most > 1:
                draws_one = each.kind is RowKind.VERIFICATION and request.draws_alone
                left = 1 if draws_one else request.num_tokens_left
                most, least = min(most, left), min(least, left)
            request.num_in_flight += most
            request.num_sure_in_flight += least
            most_all.append(most)
            least_all.append(least)
        return self.output(rounds, list(rounds_of), most_all, least_all, seated=each.kind, shares_lanes=shares_lanes)

    def output(
        self,
        rounds: Rounds,
        rounds_of: list[int],
        most_tokens: list[int],
        least_tokens: list[int],
        *,
        seated: RowKind,
        shares_lanes: bool,
    ) -> SchedulerOutput:
        """Return the launch of this plan, in which rows in their seats are of kind `seated`; changes no request."""
        return SchedulerOutput(
            requests=self.requests,
            kinds=self._kinds_in(seated),
            num_tokens=self.counts,
            num_computed=self.computed,
            num_known=self.known,
            most_tokens=most_tokens,
            least_tokens=least_tokens,
            epochs=[request.epoch for request in self.requests],
            new_pages=self.new_pages,
            rounds_of=rounds_of,
            rounds=rounds,
            shares_lanes=shares_lanes,
            enters=self.enters,
            first_scheduled=self.first_scheduled,
            resumed=self.resumed,
            total_num_scheduled_tokens=self._limits.max_num_batched_tokens - self.budget,
        )

    def _kinds_in(self, seated: RowKind) -> list[RowKind]:
        """Return the kind of each row, where rows in their seats are of kind `seated`."""
        if not self.prefill_rows:
            return [seated] * len(self.are_chunks)
        return [RowKind.PROMPT_CHUNK if is_chunk else seated for is_chunk in self.are_chunks]

"""A launch in the making: which requests take part, with how many tokens, within the limits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import ONE_STEP, Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerLimits, SchedulerOutput


class LaunchPlan:
    """Lists run in parallel, a row each.

    Args:
        rounds: what a launch of its seated rows may be.
    """

    def __init__(self, limits: SchedulerLimits, rounds: Rounds = ONE_STEP) -> None:
        self._limits, self.rounds = limits, rounds
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
        if request.num_in_flight and (request.depends_on_output or request in self.rounds.sits_out):
            return False
        if len(request.token_ids) + request.num_sure_in_flight >= request.max_total_tokens or self.budget == 0:
            return False
        tokens = self.prefill_tokens
        return not tokens or tokens <= self.prefill_room(self.decode_rows + 1, self.prefill_rows)

    def slots_of_seated(self, request: Request, known: int) -> int:
        """Tokens of a request in its seat that a step or a round may compute."""
        return self.rounds.reach(known, 1, request.max_total_tokens) if self.rounds.takes_prompts else known

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
        """Let a request take part, with so many tokens, when it knows so many at most."""
        if request.in_seat:
            self._append(request, RowKind.DECODE, count, known - 1, known, new_pages)
        else:
            self._append(request, RowKind.PROMPT_CHUNK, count, request.num_computed_tokens, known, new_pages)
            request.is_computed = request.is_trunk and request.num_computed_tokens + count == known

    def _append(
        self, request: Request, kind: RowKind, count: int, computed: int, known: int, new_pages: list[int]
    ) -> None:
        self.requests.append(request)
        self.kinds.append(kind)
        self.counts.append(count)
        self.computed.append(computed)
        self.known.append(known)
        self.new_pages.append(new_pages)
        self.budget -= count
        if kind is RowKind.PROMPT_CHUNK:
            self.prefill_rows += 1
            self.prefill_tokens += count
        else:
            self.decode_rows += 1

    @property
    def trunks_computed(self) -> list[Request]:
        """Trunks whose last chunk is in the launch."""
        return [request for request in self.requests if request.is_computed] if self.prefill_rows else []

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

    @property
    def step_kind(self) -> Hashable:
        """What steps that take as long as this plan's have in common."""
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
            kind is RowKind.PROMPT_CHUNK and not self._is_last_chunk(index, num_in_chunks)
            for index, kind in enumerate(self.kinds)
        )

    def split(self, num_in_chunks: Callable[[int], int]) -> tuple[LaunchPlan, LaunchPlan]:
        """The chunks alone, and what runs behind them: rows in their seats, and those that come into them by their last
        chunk, as far as they need no host after that."""
        chunks, seated = (LaunchPlan(self._limits, self.rounds) for _ in range(2))
        ending = []
        for index, (request, kind) in enumerate(zip(self.requests, self.kinds, strict=True)):
            if kind is not RowKind.PROMPT_CHUNK:
                seated._take(self, index)
                continue
            chunks._take(self, index)
            needs_host = request.depends_on_output or request.takes_one_round
            if not needs_host and request.num_tokens_left > 1 and self._is_last_chunk(index, num_in_chunks):
                ending.append(index)
        for index in ending:
            known = self.known[index] + 1
            seated._append(self.requests[index], RowKind.DECODE, 1, known - 1, known, [])
        return chunks, seated

    def _take(self, other: LaunchPlan, index: int) -> None:
        """Take over a row, and what is said of its request."""
        request = other.requests[index]
        self._append(
            request, other.kinds[index], other.counts[index], other.computed[index], other.known[index],
            other.new_pages[index],
        )  # fmt: skip
        for name in ("enters", "first_scheduled", "resumed"):
            if request.request_id in getattr(other, name):
                getattr(self, name).add(request.request_id)

    def commit(
        self, rounds: Rounds, rounds_of: Sequence[int], num_in_chunks: Callable[[int], int], *, shares_lanes: bool
    ) -> SchedulerOutput:
        """Account for the launch with its requests, and say what it is.

        Args:
            rounds: what was chosen.
            rounds_of: how many rounds each row takes part in; none: it is a plain step.
            num_in_chunks: how many known tokens are computed as chunks of a prompt.
            shares_lanes: whether rounds may read a trunk for several rows at once.
        """
        most_all, least_all = [], []
        each = rounds if rounds_of else ONE_STEP
        landing = {turns: (each.most_in(turns), turns * each.least_tokens) for turns in {1, *rounds_of}}
        for index, request in enumerate(self.requests):
            most, least = landing[rounds_of[index] if rounds_of else 1]
            if self.kinds[index] is RowKind.PROMPT_CHUNK:
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
        return SchedulerOutput(
            requests=self.requests,
            kinds=self._kinds_in(rounds.kind) if rounds_of else self.kinds,
            num_tokens=self.counts,
            num_computed=self.computed,
            num_known=self.known,
            most_tokens=most_all,
            least_tokens=least_all,
            epochs=[request.epoch for request in self.requests],
            new_pages=self.new_pages,
            rounds_of=list(rounds_of),
            rounds=rounds,
            shares_lanes=shares_lanes,
            enters=self.enters,
            first_scheduled=self.first_scheduled,
            resumed=self.resumed,
            total_num_scheduled_tokens=self._limits.max_num_batched_tokens - self.budget,
        )

    def _kinds_in(self, seated: RowKind) -> list[RowKind]:
        """What the rows do if those in their seats do what is said."""
        if not self.prefill_rows:
            return [seated] * len(self.kinds)
        return [kind if kind is RowKind.PROMPT_CHUNK else seated for kind in self.kinds]

"""What the scheduler is told and what it says: limits, the decisions of a launch, tokens that came back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind


@dataclass(frozen=True)
class SchedulerLimits:
    """What a step may hold: tokens in all, rows, and how many tokens of prompt chunks beside so many decode rows in so
    many prefill rows, 0 if there is no such step; and the policy."""

    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_room: Callable[[int, int], int]
    scheduling_policy: str = "fcfs"
    # From decode rows, prefill rows, prefill tokens and pages per row to what steps that take as long have in common.
    step_shape: Callable[..., Hashable] = lambda **sizes: tuple(sizes.values())
    block_size: int = 1  # tokens that see each other, which are computed at once; prompts are computed by whole ones


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
    kinds: list[RowKind]
    num_tokens: list[int]  # to compute in its first round
    num_computed: list[int]  # computed before this launch; of a row in its seat, the most that may be
    num_known: list[int]  # known before this launch, the most that may be in flight included
    most_tokens: list[int]  # that may land: 0 for a prompt chunk that leaves some for later
    least_tokens: list[int]  # that land, unless the sequence ends
    epochs: list[int]  # of the requests, at this launch
    new_pages: list[list[int]]  # that the requests got for this launch
    rounds_of: list[int]  # of the strategy's program, that each row takes part in; none: a plain step
    rounds: Rounds  # what a launch of rounds could be
    shares_lanes: bool  # whether rounds may read a trunk for several rows at once
    enters: set[str]  # requests whose latest tokens the host has to bring
    first_scheduled: set[str]
    resumed: set[str]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    then: SchedulerOutput | None = None  # what is launched behind it, planned with it

    @property
    def num_rounds(self) -> int:
        """The most of any row; 0: a plain step."""
        return max(self.rounds_of, default=0)

    @property
    def samples(self) -> list[bool]:
        """Whether tokens may land for the row."""
        return [most > 0 for most in self.most_tokens]

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
    """Tokens that came back for a request, `request.token_ids[first:last]`; none where it has ended without any."""

    request: Request
    first: int
    last: int

"""Input and output of the scheduler: limits, the decisions of a launch, and landings."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a step, and the scheduling policy. `prefill_room` maps the numbers of decode rows and prefill rows to
    the most tokens of prompt chunks in a step of these; 0: there is no such step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_room: Callable[[int, int], int]
    scheduling_policy: str = "fcfs"
    # Maps decode rows, prefill rows, prefill tokens and pages per row to a key that is equal for steps as long.
    step_shape: Callable[..., Hashable] = lambda **sizes: tuple(sizes.values())
    block_size: int = 1  # tokens that see each other and are computed at once; chunks of prompts are whole blocks


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
    """Requests that were scheduled before, with only what has changed. Lists run in parallel."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)  # recomputed after preemption: page_ids is the whole list
    new_page_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SchedulerOutput:
    """One launch's decisions. The lists up to `new_pages` run in parallel. Other views of them, for observers, are made
    only when they are read, because a launch with hundreds of rows has no time to spare."""

    requests: list[Request]
    kinds: list[RowKind]
    num_tokens: list[int]  # tokens to compute in the first round
    num_computed: list[int]  # tokens computed before this launch; of a row in its seat, the most that may be
    num_known: list[int]  # tokens known before this launch, the most that may be in flight included
    most_tokens: list[int]  # the most that may land: 0 for a prompt chunk that leaves some for later
    least_tokens: list[int]  # the fewest that land, unless the sequence ends
    epochs: list[int]  # of the requests, at this launch
    new_pages: list[list[int]]  # pages that the requests got for this launch
    rounds_of: list[int]  # rounds of the strategy's program that each row takes part in; empty: a plain step
    rounds: Rounds  # the strategy's choice, of plain steps too
    shares_lanes: bool  # whether rounds may read a trunk for several rows at once
    enters: set[str]  # requests whose latest tokens the host has to enter into their seats
    first_scheduled: set[str]
    resumed: set[str]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    then: SchedulerOutput | None = None  # the launch after this one, planned together with it

    @property
    def num_rounds(self) -> int:
        """The most rounds of any row; 0: a plain step."""
        return max(self.rounds_of, default=0)

    @property
    def samples(self) -> list[bool]:
        """Whether tokens may land, for each row."""
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
    """Tokens that landed for a request, `request.token_ids[first:last]`; none if it has ended without any."""

    request: Request
    first: int
    last: int


class Continuation(NamedTuple):
    """Where a running request continues, if its strategy decides that: what is computed, and whether it is in its seat.

    Without a continuation it is what has landed.
    """

    request: Request
    num_computed_tokens: int
    in_seat: bool

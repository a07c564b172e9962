"""Speculative decoding as a strategy: rounds where they pay, else plain decoding. It keeps the drafter up to date."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.plain_decoding import PlainDecoding, UsualStrategy
from jaxinfer.engine.strategy import LandedRounds, RoundsResult
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.stand_ins import StandIn, as_wanted
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import Continuation, SchedulerOutput
from jaxinfer.speculative.catch_up import CatchUp
from jaxinfer.speculative.costs import Key
from jaxinfer.speculative.gamma import NO_SEAT, GammaController, RoundsReport, TimedLaunch
from jaxinfer.speculative.proposer import Proposer, RoundsShape
from jaxinfer.speculative.rounds import RoundsOutput, SpeculativeRounds
from jaxinfer.speculative.shapes import SpeculationShapes
from jaxinfer.speculative.tails import TailPages
from jaxinfer.strategies.drafter_lanes import DrafterLanes
from jaxinfer.strategies.launch_timing import LaunchTiming

_TIMED_STEPS = 4  # most steps of plain decoding in a timed launch
_NEW = 0.2  # weight of a new launch in the moving average of tokens per round


class Speculation(UsualStrategy):
    """Strategy that decides for every launch how many tokens to draft, and lets the drafter catch up on sequences.

    Args:
        proposer: drafts the tokens.
        controller: decides how many tokens to draft.
        plain: plain decoding, which runs where nothing is drafted.
        shapes: shapes of launches of rounds and of catching up.
        max_rounds: most rounds in one launch.
        make_state: makes the proposer's state on the device.
        num_pages, page_size, num_seats: sizes of the pool and the engine.
        max_catch_up: most tokens that a drafter catches up on before one launch.
        window: as for `DrafterLanes`.
        tails: pages of draft trees, if trees are drafted.
    """

    def __init__(
        self,
        proposer: Proposer,
        controller: GammaController,
        plain: PlainDecoding,
        shapes: SpeculationShapes,
        *,
        max_rounds: int,
        make_state: Callable[[], Mapping[str, Any]],
        num_pages: int,
        page_size: int,
        num_seats: int,
        max_catch_up: int,
        window: int | None = None,
        tails: TailPages | None = None,
    ) -> None:
        self.follower, self._proposer = proposer, proposer
        self.models, self._make_state = proposer.models, make_state
        self.controller = controller
        self._make_lanes = functools.partial(
            DrafterLanes, num_pages=num_pages, page_size=page_size, num_seats=num_seats,
            knows_pages=proposer.knows_pages, window=window,
        )  # fmt: skip
        self.lanes = self._make_lanes()
        self._plain, self._shapes, self._bucket = plain, shapes, launch_bucket(plain, shapes)
        each = (*shapes.rounds, *shapes.lanes)
        self._rounds = SpeculativeRounds(proposer, max_rounds, each, tails, plain.program.processed)
        self._tails = tails
        self._catch_up = CatchUp(proposer, shapes.catch_up)
        self._max_catch_up = max_catch_up
        self._page_table = np.zeros((0, 0), np.int32)  # the engine's, of the latest launch
        self._num_seats = num_seats
        self.latest: LandedRounds[RoundsOutput] | None = None
        self._tokens_per_round = 2.0  # that land for a sequence, moving average
        self._tokens_per_launch = plain.rounds.most
        self._shape_for, self._shape_of = functools.cache(shapes.rounds_for), functools.cache(shapes.rounds_of)

    @property
    def programs(self) -> Sequence[Program]:
        return [self._rounds, self._catch_up]

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        num_drafts, num_nodes, is_trial = 0, 0, False
        of_seats = np.zeros(self._num_seats + 1, int)
        pages = max([len(request.pages) for request in requests], default=1)
        seats = np.asarray([request.seat for request in requests], np.int32)
        if not requests:  # waiting requests may decode at once
            seats = np.full(min(num_waiting, self._num_seats), NO_SEAT, np.int32)
        if len(seats):
            chosen, num_nodes, is_trial = self.controller.choose(seats, pages)
            num_drafts = int(chosen.max())
            launch = (len(seats), pages, any([request.shares_lane for request in requests]))
            if num_drafts and not self._has_room(num_drafts, num_nodes, *launch):
                # Too many rows for trees, or for so many drafts: the longest chains that a program exists for.
                longest = min(num_drafts, self._shapes.longest_chain)
                fitting = (number for number in range(longest, 0, -1) if self._has_room(number, 0, *launch))
                num_drafts, num_nodes = next(fitting, 0), 0
            of_seats[:] = num_drafts
            of_seats[seats] = np.minimum(chosen, num_drafts)
        running = min(len(requests) + num_waiting, self._num_seats)
        feeds = num_drafts > 0 or (running > len(requests) and self.controller.would_draft(running, pages))
        choice = _Choice(num_drafts, num_nodes, of_seats, feeds)
        plain = self._plain.choose(requests, num_waiting)
        if not num_drafts:
            return replace(plain, choice=choice)
        # A drafter catches up only on what the host knows: until tokens in flight have landed, such a row sits out.
        sits_out = [
            request
            for request in self.lanes.behind(requests)
            if request.num_in_flight and self.lanes.missing(request, request.num_tokens - 1, self._max_catch_up)
        ]
        # As many tokens as in a plain launch, so that finished sequences make room for others, or for a smaller shape,
        # just as soon.
        rounds = 1 if is_trial else round(self._tokens_per_launch / self._tokens_per_round)
        return Rounds(
            RowKind.VERIFICATION,
            most=min(max(rounds, 1), self._rounds.max_rounds),
            most_tokens=num_drafts + 1,
            tokens=self._tokens_per_round,
            sits_out=frozenset(sits_out),
            holds=functools.partial(self._has_room, num_drafts, num_nodes),
            most_in_lane=self._tails.per_lane if self._tails is not None and num_nodes else None,
            plain=replace(plain, choice=replace(choice, num_drafts=0, num_nodes=0)),
            choice=choice,
        )

    def _has_room(self, num_drafts: int, num_nodes: int, rows: int, pages_per_row: int, shares_lanes: bool) -> bool:
        """Return whether a program of rounds holds so many sequences, in rows and, if any share lanes, in lanes."""
        if self._bucket(rows, pages_per_row, num_drafts, num_nodes) is None:
            return False
        return not shares_lanes or any(
            shape.batch.num_tokens >= rows
            for shape in self._shapes.lanes
            if shape.num_nodes == num_nodes and shape.width > num_drafts
        )

    @property
    def num_tail_pages(self) -> int:
        return 0 if self._tails is None else self._tails.each * self._shapes.most_in_trees

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        choice: _Choice = rounds.choice
        if not choice.num_drafts:
            return self._plain.shape_for(rounds, rows=rows, pages_per_row=pages_per_row, lanes=lanes, stand_in=stand_in)
        shape = self._shape_for(
            rows=rows, pages_per_row=pages_per_row, num_drafts=choice.num_drafts, num_nodes=choice.num_nodes,
            lanes=lanes,
        )  # fmt: skip
        if shape is None:
            raise ValueError(f"{rows} rows with {choice.num_drafts} drafts each exceed the limits")
        return stand_in(self._rounds, shape).batch

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        self._page_table = batch.page_table
        choice: _Choice = output.rounds.choice
        feeds = choice.num_drafts > 0 if output.num_rounds else choice.feeds
        if output.first_scheduled or output.resumed or any(output.new_pages):
            for request_id in output.first_scheduled | output.resumed:
                self.controller.enter(batch.seat_of[request_id])
            self.lanes.take_pages(output, with_drafter=feeds)
        if any([request.guard for request in output.requests]):
            self.lanes.reenter(output.requests)
        if feeds:
            self._let_catch_up(output, batch, runner)
        if output.num_rounds and feeds:
            draws_alone = np.asarray([request.draws_alone for request in output.requests], bool)
            drafts = np.where(self.lanes.follows[built.seats] & ~draws_alone, choice.of_seats[built.seats], 0)
            built.packed["max_drafts"][built.rows] = drafts
        built.packed["drafter_follows"][...] = feeds
        self._say_starts(built)
        self.lanes.launched(output, with_drafter=feeds)

    def _say_starts(self, built: BuiltBatch) -> None:
        """Set the first token of each row that the drafter sees; it is the same for all sequences of a lane."""
        packed, starts = built.packed, self.lanes.start[built.seats]
        rows = packed["row"][built.rows] if packed.shape.lane_pages else built.rows
        # In a lane, a sequence that is not followed drafts nothing, and its start does not count.
        known = self.lanes.follows[built.seats] if packed.shape.lane_pages else slice(None)
        np.maximum.at(packed["drafter_start"], rows[known], starts[known].astype(np.int32))

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        choice: _Choice = output.rounds.choice
        if not choice.num_drafts:
            return self._plain.launch(output, built, runner)
        shape = self._shape_of(built.packed.shape, choice.num_drafts, choice.num_nodes)
        result: RoundsOutput = runner.launch(self._rounds, shape, built.packed.buffer)
        details = _Rounds(choice.num_drafts, shape, result)
        return RoundsResult(
            result.tokens, shape.width, details, was_redrawn=result.was_redrawn, num_accepted=result.num_accepted,
            logprobs=result.logprobs,
        )  # fmt: skip

    def landed(
        self,
        output: SchedulerOutput,
        built: BuiltBatch,
        result: RoundsResult | None,
        steps: int,
        seconds: float,
        metrics: EngineMetrics,
    ) -> Sequence[Continuation]:
        if result is None or result.details is None:
            if seconds and output.num_rounds:
                pages = built.packed.shape.pages_per_row
                self.controller.timed(TimedLaunch(0, len(output.requests), pages, steps, seconds))
            return ()
        details: _Rounds = result.details
        arrays, num_nodes = details.output, details.shape.num_nodes
        # Rows that continue from other tokens, or whose tokens are not walked yet, say nothing of the drafts.
        counts = [
            index
            for index, (request, epoch) in enumerate(zip(output.requests, output.epochs, strict=True))
            if request.epoch == epoch and not request.num_walking
        ]
        rows, requests = built.rows[counts], [output.requests[index] for index in counts]
        report = RoundsReport(
            seats=built.seats[counts],
            ran=np.asarray(arrays.tokens)[:: result.width, rows] >= 0,
            wanted=built.packed["max_drafts"][rows],
            drafted=np.asarray(arrays.num_drafts)[:, rows],
            accepted=np.asarray(arrays.num_accepted)[:, rows],
            entropy=np.asarray(arrays.entropy)[:, rows],
            num_nodes=num_nodes,
        )
        self.controller.observe(report)
        if seconds:
            silent = int((report.ran.any(axis=1) & ~report.drafted.any(axis=1)).sum())
            pages = built.packed.shape.pages_per_row
            self.controller.timed(
                TimedLaunch(details.num_drafts, len(output.requests), pages, steps, seconds, silent, num_nodes)
            )
        proposed = details.shape.proposed(report.drafted)
        metrics.count_drafts(report.drafted, report.accepted, proposed)
        self.latest = LandedRounds(requests, rows, arrays)
        if report.ran.any():
            found = 1 + report.accepted[report.ran].mean()
            self._tokens_per_round += _NEW * (float(found) - self._tokens_per_round)
        for request, drafts, tokens, kept in zip(
            requests, (report.drafted > 0).sum(axis=0).tolist(), proposed.sum(axis=0).tolist(),
            report.accepted.sum(axis=0).tolist(), strict=True,
        ):  # fmt: skip
            own = request.metrics
            own.num_drafts += drafts
            own.num_draft_tokens += tokens
            own.num_accepted_tokens += kept
        return ()

    def measure(self, runner: Runner, allocator: PageAllocator) -> None:
        costs = self.controller.costs
        # After the first round, a lookup may find nothing to draft after dummy tokens.
        max_rounds = 1 if self._proposer.may_find_nothing else self._rounds.max_rounds
        timing = LaunchTiming(
            runner, allocator, page_size=self.lanes.page_size,
            most_tokens=max(_TIMED_STEPS, max_rounds * max(shape.width for shape in self._shapes.rounds)),
        )  # fmt: skip
        if costs is None or not timing.has_room:
            return
        plain = self._plain.program
        for batch in self._plain.shapes:
            step = timing.seconds(
                batch, lambda packed, batch=batch: runner.launch(plain, batch, packed.buffer), max_rounds=_TIMED_STEPS
            )
            costs.set((batch.num_rows, batch.pages_per_row, 1, 0), verification=step, draft=0.0)
        for shape in self._shapes.rounds:

            def launch(packed: PackedBatch, shape: RoundsShape = shape) -> Any:
                return runner.launch(self._rounds, shape, packed.buffer)

            few, many = (
                timing.seconds(shape.batch, launch, max_rounds=max_rounds, num_drafts=number)
                for number in (1, shape.width - 1)
            )
            draft = max(0.0, (many - few) / (shape.width - 2)) if shape.width > 2 else 0.0
            costs.set(_key_of(shape), verification=few - draft, draft=draft)

    def left(self, request_ids: Iterable[str]) -> None:
        self.lanes.left(request_ids, self._page_table)

    def make_state(self) -> Mapping[str, Any]:
        return self._make_state()

    def weights_changed(self, model: str, requests: Sequence[Request]) -> Sequence[Continuation]:
        if model in self.models or self._proposer.capture:
            self.lanes.forget()
        return ()

    def start_over(self) -> None:
        self.lanes = self._make_lanes()

    def _let_catch_up(self, output: SchedulerOutput, batch: InputBatch, runner: Runner) -> None:
        """Launch catching up for rows that the drafter does not follow, as far as the host knows their tokens."""
        lanes, budget = self.lanes, self._max_catch_up
        found: list[tuple[Request, int, int]] = []
        for index, request in enumerate(output.requests):
            if lanes.follows[request.seat] or not budget:
                continue
            known = request.num_tokens
            is_chunk = output.kinds[index] is RowKind.PROMPT_CHUNK
            end = output.num_computed[index] if is_chunk else known - 1
            missing = lanes.missing(request, end, budget)
            if missing is not None and not self._is_computed_now(output, index, *missing):
                first, count = missing
                found.append((request, first, count))
                budget -= count
                lanes.computed(request, first + count, first)
            if not is_chunk and output.num_known[index] == known:
                lanes.follows[request.seat] = lanes.has(request.seat, known - 1)
        while found:
            found = self._launch_catch_up(found, batch, runner)

    def _is_computed_now(self, output: SchedulerOutput, index: int, first: int, count: int) -> bool:
        """Return whether what a row needs computed again is first computed in this launch, by other rows: then it
        catches up later."""
        if self.lanes.window is None:
            return False
        size, own = self.lanes.page_size, output.requests[index].pages
        wanted = set(own[first // size : (first + count - 1) // size + 1])
        for other, request in enumerate(output.requests):
            if other != index and output.kinds[other] is RowKind.PROMPT_CHUNK:
                start, end = output.num_computed[other], output.num_computed[other] + output.num_tokens[other]
                if wanted.intersection(request.pages[start // size : (end - 1) // size + 1]):
                    return True
        return False

    def _launch_catch_up(
        self, found: list[tuple[Request, int, int]], batch: InputBatch, runner: Runner
    ) -> list[tuple[Request, int, int]]:
        """Launch one batch of (request, first token, count), and return what did not fit."""
        lanes = self.lanes
        pages = int(max(batch.num_pages[request.seat] for request, _, _ in found))
        shape = self._shapes.catch_up_for(
            rows=len(found), tokens=sum(count for *_, count in found), pages_per_row=pages
        )
        taken, room = [], shape.num_tokens
        while found and room and len(taken) < shape.num_rows:
            request, first, count = found[0]
            now = min(count, room)
            taken.append((request, first, now))
            room -= now
            again = int(lanes.window is not None)  # features of the last token are not kept between launches
            found = [(request, first + now - again, count - now + again), *found[1:]] if now < count else found[1:]
        requests, starts, counts = zip(*taken, strict=True)
        packed = batch.build_chunks(shape, requests, starts, counts)
        packed["drafter_start"][: len(taken)] = lanes.start[[request.seat for request in requests]]
        runner.launch(self._catch_up, shape, packed.buffer)
        return found


@dataclass(frozen=True)
class _Choice:
    """Choice of what the next launch drafts."""

    num_drafts: int  # most drafts of a row in a launch of rounds
    num_nodes: int
    of_seats: np.ndarray  # int [num_seats + 1], drafts of the sequence in each seat, or that may get it
    feeds: bool  # whether the drafter takes in what a plain step computes


@dataclass(frozen=True)
class _Rounds:
    """Results of a launch of rounds, on the device."""

    num_drafts: int
    shape: RoundsShape
    output: RoundsOutput


def launch_bucket(plain: PlainDecoding, shapes: SpeculationShapes) -> Callable[[int, int, int, int], Key | None]:
    """Return (rows, pages per row, drafts, tree nodes) -> key of the shape of such a launch; None: there is none."""

    @functools.cache  # asked for many times a launch
    def bucket(rows: int, pages_per_row: int, num_drafts: int, num_nodes: int) -> Key | None:
        if not num_drafts:
            shape = plain.shape_for(
                plain.rounds, rows=rows, pages_per_row=pages_per_row, lanes=False, stand_in=as_wanted
            )
            return shape.num_rows, shape.pages_per_row, 1, 0
        found = shapes.rounds_for(rows=rows, pages_per_row=pages_per_row, num_drafts=num_drafts, num_nodes=num_nodes)
        return None if found is None else _key_of(found)

    return bucket


def _key_of(shape: RoundsShape) -> Key:
    return shape.batch.num_rows, shape.batch.pages_per_row, shape.verified, shape.num_nodes

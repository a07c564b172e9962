"""Launches and landings: what the scheduler decides runs on the device, and its results are read one launch late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from jaxinfer.constraints.block_walk import BlockWalk
from jaxinfer.constraints.guard import Walk
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.logprobs import ask_for_logprobs, known_targets, logprobs_of_launch, take_known_logprobs
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.seat_entries import SeatEntries
from jaxinfer.engine.strategy import RoundsResult, Strategy
from jaxinfer.engine.walkers import Walkers
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.step import StepOutput
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.scheduling.landing import DraftsOf
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import SchedulerOutput

# A result that was ready before the host read it does not tell how long the device took. Reading takes time too: the
# host has waited if the read took at least so many seconds, and such a share of the launch's apparent time.
_WAITED, _SHARE_WAITED = 20e-6, 0.05


type LaunchListener = Callable[[SchedulerOutput], None]


@dataclass
class _Launch:
    """A launch in flight."""

    output: SchedulerOutput
    built: BuiltBatch
    token_ids: jax.Array  # int32 [N * width, Q], a row's tokens in order, or [Q] of a step; -1: none
    width: int = 1  # the most tokens that a step lands for a row
    rounds: RoundsResult | None = None  # None: a plain step
    was_redrawn: jax.Array | None = None  # bool [Q], first tokens that masks have changed; None: there are no masks
    logprobs: TokenLogprobs | None = None  # [N * width, Q]; None: no row asks for any
    known_logprobs: TokenLogprobs | None = None
    begin: float | None = None  # when it was launched; None: it is not timed
    compiles: int = 0  # number of compiles before it was launched


def _rounds_run(launch: _Launch, landed: np.ndarray) -> int:
    """Return in how many rounds of a launch any row took part or, if that is unknown, `landed` something, which is bool
    [N * width, rows]."""
    assert launch.rounds is not None
    if launch.rounds.ran is None:
        return int(landed[:: launch.width].any(axis=1).sum())
    return int(np.asarray(launch.rounds.ran)[:, launch.built.logits_rows].any(axis=1).sum())


def _redrawn_in(launch: _Launch) -> Callable[[int], bool]:
    """Return a function that says of a row, by its index, whether a mask has changed its first token."""
    found: np.ndarray | None = None

    def was_redrawn(index: int) -> bool:
        nonlocal found
        if launch.was_redrawn is None:
            return False
        if found is None:  # read only if there is a row with a guard
            found = np.asarray(launch.was_redrawn)
        return bool(found[launch.built.logits_rows[index]])

    return was_redrawn


def _drafts_in(launch: _Launch, tokens: np.ndarray) -> DraftsOf | None:
    """Return a function that finds the accepted drafts of a row, by its index; None: there are none that a request of
    the launch wants to know of.

    Args:
        tokens: int32 [N * width, rows], -1: none.
    """
    accepted = None if launch.rounds is None else launch.rounds.num_accepted
    if accepted is None or not any([one.sampling_params.return_token_sources for one in launch.output.requests]):
        return None
    counts = np.asarray(accepted)[:, launch.built.logits_rows]
    place = np.arange(len(tokens)) % launch.width
    are_drafts = place[:, None] < np.repeat(counts, launch.width, axis=0)
    return lambda index: np.flatnonzero(are_drafts[tokens[:, index] != -1, index]).tolist()


def _num_drawn(walk: Walk, tokens: Sequence[int]) -> int:
    """Return along how many drawn tokens a walk was; of a block, other places have none."""
    return sum(token >= 0 for token in tokens) if isinstance(walk, BlockWalk) else len(tokens)


class Launcher:
    """Runs the launches of one scheduler and lands their results.

    Args:
        entries: the entries of sequences into seats; None: the strategy's rounds seat them.
        walkers: walks along the tokens of constrained requests.
        landing: called with each request before its tokens land.
        launching: called with each launch before it runs.

    Attributes:
        concerned: the requests of the work at hand: all unfinished ones while a launch is planned, its rows while it is
            launched, and the rows of a launch while it is read.
        has_moved: whether the latest `launch` took requests out of their seats.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        input_batch: InputBatch,
        entries: SeatEntries | None,
        strategy: Strategy,
        programs: EnginePrograms,
        runner: Runner,
        metrics: EngineMetrics,
        walkers: Walkers,
        landing: Callable[[Request], None],
        launching: Sequence[LaunchListener] = (),
    ) -> None:
        self.scheduler, self.input_batch, self.strategy, self._entries = scheduler, input_batch, strategy, entries
        self.programs, self.runner, self.metrics = programs, runner, metrics
        self._walkers, self._landing, self._launching = walkers, landing, launching
        self.concerned: Sequence[Request] = ()
        self.has_moved = False
        self._in_flight: deque[_Launch] = deque()
        self._ready, self._is_exact = 0.0, False  # when the latest results were ready; whether exactly

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def drop(self) -> None:
        """Drop all launches in flight, and rows that wait for walks."""
        self._in_flight.clear()
        self._walkers.drop()
        self.concerned = ()

    def launch(self, rounds: Rounds) -> bool:
        """Schedule and launch; return whether there was anything to run. Launches of seated rows run these rounds."""
        begin = time.perf_counter()
        self.concerned = list(self.scheduler.requests.values())
        output: SchedulerOutput | None = self.scheduler.schedule(rounds)
        left = output.finished_req_ids | output.preempted_req_ids
        self.has_moved = bool(left)
        if left:
            self.strategy.left(left)
            self.input_batch.remove(left)
        if not output.requests:
            return False
        while output is not None:
            self._launch(output, begin)
            begin, output = time.perf_counter(), output.then
        return True

    def _launch(self, output: SchedulerOutput, begin: float) -> None:
        """Prepare and launch what was decided at `begin`."""
        compiles = self.metrics.num_compiles_total
        self.concerned = output.requests
        for listen in self._launching:
            listen(output)
        built = self.input_batch.build(output)
        has_logprobs = ask_for_logprobs(output, built)
        if self._entries is not None:
            self._entries.launch(output)
        self.strategy.prepare(output, built, self.input_batch, self.runner)
        launch_begin = time.perf_counter()
        launched = self._launch_rounds(output, built) if output.num_rounds else self._launch_step(output, built)
        if not has_logprobs:
            launched.logprobs = None
        metrics = self.metrics
        metrics.num_launches_total += 1
        metrics.scheduled_tokens_total += output.total_num_scheduled_tokens
        if metrics.num_compiles_total == compiles:  # a compile is not the host's everyday work
            metrics.host_seconds_total += time.perf_counter() - begin
            launched.begin, launched.compiles = launch_begin, compiles
        self._in_flight.append(launched)

    def _launch_rounds(self, output: SchedulerOutput, built: BuiltBatch) -> _Launch:
        result = self.strategy.launch(output, built, self.runner)
        return _Launch(output, built, result.token_ids, result.width, result, result.was_redrawn, result.logprobs)

    def _launch_step(self, output: SchedulerOutput, built: BuiltBatch) -> _Launch:
        """Launch a step and, after it, log probabilities of tokens that are known before, if they are wanted."""
        programs, launch = self.programs, self.runner.launch
        result: StepOutput = launch(programs.step, built.packed.shape, built.packed.buffer)
        known_logprobs = None
        known = known_targets(output, built)
        if known is not None:
            targets, temperatures = known
            count = result.hidden.shape[0]
            padding = (0, count - len(targets))
            known_logprobs = launch(
                programs.prompt_logprobs, count, result.hidden, np.pad(targets, padding),
                np.asarray(len(targets), np.int32), np.pad(temperatures, padding, constant_values=1),
            )  # fmt: skip
        return _Launch(
            output, built, result.token_ids, was_redrawn=result.was_redrawn, logprobs=result.logprobs,
            known_logprobs=known_logprobs,
        )  # fmt: skip

    def land(self) -> None:
        """Read the oldest launch's results and account for them."""
        launch = self._in_flight[0]
        self.concerned = launch.output.requests
        waits = time.perf_counter()
        tokens = np.atleast_2d(np.asarray(launch.token_ids))[:, launch.built.logits_rows]  # waits for the device
        begin = time.perf_counter()
        seconds, was_exact = 0.0, self._is_exact
        self._is_exact = begin - waits > _WAITED
        if self.metrics.num_compiles_total != launch.compiles:
            launch.begin = None  # on a CPU, compiles meanwhile take time from launches
        if launch.begin is not None:
            seconds = begin - max(launch.begin, self._ready)
            self._is_exact &= begin - waits > _SHARE_WAITED * seconds
            # It began when the launch before it ended, a time that is unknown if that was read late.
            if not self._is_exact or not (was_exact or launch.begin >= self._ready):
                seconds = 0.0
        before, self._ready = self._ready, begin
        landed = tokens >= 0
        # A launch whose rows had all ended runs no round at all, while a plain step runs even if it lands nothing.
        steps = 1 if launch.rounds is None else _rounds_run(launch, landed)
        by_request = tokens.T.tolist()
        if not landed.all() and not launch.output.rounds.walks_blocks:
            by_request = [[token for token in row if token != -1] for row in by_request]
        if launch.known_logprobs is not None:
            take_known_logprobs(launch.output, launch.built, launch.known_logprobs)
        entries = None
        if launch.logprobs is not None:
            entries = logprobs_of_launch(launch.built, launch.logprobs, landed)
        metrics = self.metrics
        drafts = _drafts_in(launch, tokens)
        walks = self._walkers.walk(
            launch.output, by_request, entries, self._is_device_busy, _redrawn_in(launch), drafts
        )
        if walks is not None:
            self._note_walks(launch, by_request, walks)
        landings = self.scheduler.update_from_output(launch.output, by_request, entries, self._landing, walks, drafts)
        self.scheduler.continue_from(
            self.strategy.landed(launch.output, launch.built, launch.rounds, max(1, steps), seconds, metrics)
        )
        for index, walk in (walks or {}).items():
            self._tell_of_block(launch.output.requests[index], walk)
        self._in_flight.popleft()
        if launch.begin is not None and launch.begin < before:  # it was in flight when the one before it landed
            kinds = launch.output.kinds
            kind = launch.built.packed.shape if RowKind.PROMPT_CHUNK in kinds else kinds[0]
            self.scheduler.pace.note(kind, max(1, steps), begin - before)
        if not self.scheduler.requests:
            for left in self._in_flight:  # it is read with the next launch, whenever that is
                left.begin = None
        metrics.num_steps_total += steps
        metrics.scheduled_rows_total += steps * len(launch.output.requests)
        metrics.count_landings(landings, time.perf_counter())
        metrics.host_seconds_total += time.perf_counter() - begin

    @property
    def num_walking(self) -> int:
        """Rows whose tokens were read and are not walked yet."""
        return self._walkers.num_walking

    def land_walked(self, *, seconds: float = 0.0) -> bool:
        """Land rows whose walks have ended since their launches were read; return whether there were any.

        Args:
            seconds: how long to wait if there is none yet.
        """
        found = False
        if self._walkers.num_walking:
            self.concerned = self._walkers.requests
        for row in self._walkers.take(seconds=seconds):
            found = True
            self.concerned = row.output.requests
            self.metrics.count_walk(row.walk, _num_drawn(row.walk, row.tokens))
            landings = self.scheduler.update_from_output(
                row.output, [row.tokens], lambda request, index, tokens, row=row: row.entries, self._landing,
                {0: row.walk}, lambda _, row=row: row.drafts,
            )  # fmt: skip
            self._tell_of_block(row.output.requests[0], row.walk)
            self.metrics.count_landings(landings, time.perf_counter())
        return found

    def _tell_of_block(self, request: Request, walk: Walk | None) -> None:
        if isinstance(walk, BlockWalk):
            self.strategy.walked(request, walk, self.metrics)

    def _is_device_busy(self) -> bool:
        """Whether the device has not ended a launch that is in flight after the one that is read."""
        return len(self._in_flight) > 1 and not cast(Any, self._in_flight[1].token_ids).is_ready()

    def _note_walks(self, launch: _Launch, sampled: Sequence[Sequence[int]], walks: Mapping[int, Walk | None]) -> None:
        """Note which first tokens masks have changed, and count what walks have found."""
        was_redrawn = _redrawn_in(launch)
        for index, walk in walks.items():
            request = launch.output.requests[index]
            if walk is not None:
                self.metrics.count_walk(walk, _num_drawn(walk, sampled[index]))
            # After a refusal this token is the refused one's second draw, which is noted already.
            if was_redrawn(index) and not request.drops_drawn:
                self.metrics.constraint_refusals_total += 1
                if request.has_masks:
                    request.note_refusals(0, is_refused=True)

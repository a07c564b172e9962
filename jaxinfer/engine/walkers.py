"""Walks along the drawn tokens of constrained requests, in threads beside the one that steps."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.block_walk import walk_block
from jaxinfer.constraints.guard import Walk, walk
from jaxinfer.constraints.workers import Workers
from jaxinfer.outputs import Logprob
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.scheduling.constrained_blocks import block_limits
from jaxinfer.scheduling.landing import DraftsOf, LogprobsOf, is_awaited
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import ConstrainedRounds, Rounds
from jaxinfer.scheduling.scheduler_output import SchedulerOutput

# Length of one wait for walks, between two looks at the device.
_SLICE_SECONDS = 1e-3
# Most seconds that other rows wait for walks while the device has nothing to do.
_MOST_IDLE_SECONDS = 2e-3


@dataclass(eq=False)
class _Walking:
    """Tokens of a row that were read and are not walked yet."""

    output: SchedulerOutput  # of this row alone
    tokens: Sequence[int]
    entries: Sequence[dict[int, Logprob]]
    future: Future[Walk]
    was_redrawn: bool  # whether a mask has changed the first token
    drafts: Sequence[int]  # places of accepted drafts among the tokens, if the request wants to know


@dataclass(frozen=True)
class WalkedRow:
    """A row that lands later than the other rows of its launch."""

    output: SchedulerOutput  # of this row alone
    tokens: Sequence[int]
    entries: Sequence[dict[int, Logprob]]
    walk: Walk
    drafts: Sequence[int]


class Walkers:
    """The walks of one engine. Those of a request follow each other; a row lands once its walk is done.

    Args:
        workers: the threads.
        vocab: size of the vocabulary.
    """

    def __init__(self, workers: Workers, vocab: int) -> None:
        self._workers, self._vocab = workers, vocab
        self._walking: list[_Walking] = []

    @property
    def num_walking(self) -> int:
        """Rows that wait for their walks."""
        return len(self._walking)

    @property
    def requests(self) -> list[Request]:
        """Requests of the rows that wait for their walks."""
        return [row.output.requests[0] for row in self._walking]

    def walk(
        self,
        output: SchedulerOutput,
        sampled: Sequence[Sequence[int]],
        entries_of: LogprobsOf | None,
        is_device_busy: Callable[[], bool],
        was_redrawn: Callable[[int], bool],
        drafts_of: DraftsOf | None,
    ) -> dict[int, Walk | None] | None:
        """Begin the walks of a launch's rows, and wait for them as long as the device is busy anyway.

        Args:
            is_device_busy: whether a launch is in flight that the device has not ended.
            was_redrawn: (index of a row) -> whether a mask has changed its first token.
            drafts_of: finds accepted drafts; None: no request of the launch wants to know of any.

        Returns:
            For each row of a request with a guard, by its index, its walk; None for a row that lands later. None: the
            launch has no such row.
        """
        if not any([request.is_walked for request in output.requests]):
            return None
        self._drop_void()  # what has landed since may have made rows void, which new ones do not follow
        works: dict[int, Callable[[], Walk]] = {}
        rows = zip(output.requests, output.most_tokens, output.epochs, sampled, strict=True)
        for index, (request, most, epoch, tokens) in enumerate(rows):
            if request.is_walked and most and tokens and is_awaited(request, epoch):
                if output.rounds.walks_blocks:
                    works[index] = self._work_on_block(request, output.rounds, tokens)
                else:
                    works[index] = self._work(request, most, tokens)
        if not works:
            return None
        try:
            begun = dict(zip(works, self._workers.submit_all(list(works.values())), strict=True))
        except ConstraintError as error:  # no thread is left
            begun = {index: _failed(output.requests[index], str(error)) for index in works}
        ended, idle = _all_ended(begun.values()), 0.0
        while idle < _MOST_IDLE_SECONDS:
            now = time.perf_counter()
            if ended.acquire(timeout=_SLICE_SECONDS):
                break
            if not is_device_busy():
                idle += time.perf_counter() - now
        found: dict[int, Walk | None] = {}
        waits = {row.output.requests[0] for row in self._walking}
        for index, future in begun.items():
            request = output.requests[index]
            if future.done() and request not in waits:
                found[index] = _result(future, request, was_redrawn=was_redrawn(index))
                continue
            found[index] = None
            request.num_walking += 1
            tokens = sampled[index]
            entries = () if entries_of is None else entries_of(request, index, tokens)
            drafts = () if drafts_of is None else drafts_of(index)
            self._walking.append(_Walking(_only(output, index), tokens, entries, future, was_redrawn(index), drafts))
        return found

    def _work(self, request: Request, most: int, tokens: Sequence[int]) -> Callable[[], Walk]:
        guard, state = request.guard, request.guard_state
        assert guard is not None and state is not None
        limits = request.walk_limits(self._vocab)
        limits = limits._replace(num_in_flight=limits.num_in_flight - most)
        drawn = tokens[:-1] if tokens[-1] == NO_SCORE else tokens
        before = next((row.future for row in reversed(self._walking) if row.output.requests[0] is request), None)

        def work() -> Walk:
            from_state, own = state, limits
            if before is not None:
                earlier = before.result()
                if earlier.reenters or earlier.is_complete or earlier.error:
                    return replace(earlier, num_kept=0)  # these tokens are void, and so are those after them
                from_state, own = earlier.state, limits._replace(num_output_tokens=earlier.num_output_tokens)
            found = walk(guard, from_state, drawn, own)
            return replace(found, num_output_tokens=own.num_output_tokens + found.num_kept)

        return work

    def _work_on_block(self, request: Request, rounds: Rounds, drawn: Sequence[int]) -> Callable[[], Walk]:
        """Return the walk along the draws of a round; the request has no other launch in flight."""
        guard, block = request.guard, request.block
        assert guard is not None and block is not None and isinstance(rounds, ConstrainedRounds)
        limits = block_limits(request, rounds, self._vocab)
        return lambda: walk_block(guard, block, drawn, limits)

    def take(self, *, seconds: float = 0.0) -> list[WalkedRow]:
        """Return the rows whose walks are done by now, in their order.

        Args:
            seconds: how long to wait if there is none yet.
        """
        if not self._walking:
            return []
        if seconds:
            wait([row.future for row in self._walking], timeout=seconds, return_when="FIRST_COMPLETED")
        self._workers.give_up_stuck()
        self._drop_void()
        taken: list[WalkedRow] = []
        left: list[_Walking] = []
        waits: set[Request] = set()
        for row in self._walking:
            request = row.output.requests[0]
            if request in waits or not row.future.done():
                left.append(row)
            else:
                request.num_walking -= 1
                walk = _result(row.future, request, was_redrawn=row.was_redrawn)
                taken.append(WalkedRow(row.output, row.tokens, row.entries, walk, row.drafts))
            waits.add(request)  # once it has landed, its later rows may be void
        self._walking = left
        return taken

    def _drop_void(self) -> None:
        """Drop the rows whose tokens no longer count."""
        left: list[_Walking] = []
        for row in self._walking:
            request = row.output.requests[0]
            if is_awaited(request, row.output.epochs[0]):
                left.append(row)
            else:
                request.num_walking = max(0, request.num_walking - 1)  # one that has started over has none
        self._walking = left

    def drop(self) -> None:
        """Drop all rows that wait."""
        self._walking.clear()


def _all_ended(futures: Collection[Future[Walk]]) -> threading.Lock:
    """Return a lock that is released once all have ended."""
    # `concurrent.futures.wait` takes the locks of all futures, each time that it is called.
    lock, left = threading.Lock(), itertools.count(len(futures) - 1, -1)
    lock.acquire()
    for future in futures:
        future.add_done_callback(lambda _: None if next(left) else lock.release())
    return lock


def _failed(request: Request, error: str) -> Future[Walk]:
    """Return the result of a walk that cannot be made."""
    assert request.guard_state is not None
    future: Future[Walk] = Future()
    future.set_result(Walk(0, request.guard_state, error=error))
    return future


def _result(future: Future[Walk], request: Request, *, was_redrawn: bool) -> Walk:
    assert request.guard_state is not None
    try:
        found = future.result()
        return replace(found, was_redrawn=True) if was_redrawn else found
    except ConstraintError as error:
        return Walk(0, request.guard_state, error=str(error))


def _only(output: SchedulerOutput, index: int) -> SchedulerOutput:
    """Return the launch as if it had one row alone."""
    columns = (
        "requests", "kinds", "num_tokens", "num_computed", "num_known", "most_tokens", "least_tokens", "epochs",
        "new_pages",
    )  # fmt: skip
    return replace(output, **{name: [getattr(output, name)[index]] for name in columns}, rounds_of=[], then=None)

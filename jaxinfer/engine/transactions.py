"""Steps and notes as transactions: each ends whole, or the next one begins by rebuilding the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jaxinfer.engine.notes import Notes
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import Landing


class Transactions:
    """Keeps the truth of one engine, registered requests and how much of them was handed out, and runs what changes it.

    A mark is set before a step and cleared at its end. If it is still set, the step before was interrupted, and the
    next call recovers first. So nothing has to be undone, and an interruption of a recovery changes nothing either.

    Args:
        advance: makes one step.
        blame: called with an exception that a step has raised; raises what must leave the step.
        recover: rebuilds everything but requests and landed tokens.

    Attributes:
        requests: registered requests by id: unfinished, or their end was not handed out yet.
        news: requests that may have landed tokens or ended since landings were last announced.
        notes: work to do between steps.
        listeners: called with landings within the step, maybe twice with the same if a step is interrupted.
        runs: whether a step runs, or work between two steps.
        owner: the only thread that runs steps and the work between them; None: any thread, one at a time.
        running: the thread that makes a step, or works between two steps; None: none does.
        recovers: whether a recovery has begun and not ended: after a step that has raised, the recovery has raised.
    """

    def __init__(
        self, advance: Callable[[], None], blame: Callable[[Exception], None], recover: Callable[[], None]
    ) -> None:
        self._advance, self._blame, self._remake = advance, blame, recover
        self.requests: dict[str, Request] = {}
        self.news: list[Request] = []
        self.notes = Notes()
        self.listeners: list[Callable[[list[Landing]], None]] = []
        self.runs = False
        self.owner: threading.Thread | None = None
        self.running: threading.Thread | None = None
        self.recovers = False
        self._outgoing: list[Landing] = []  # what the step that runs, or ran last, hands out
        self._open: list[bool] = []  # the mark: not empty while a step runs, and after one that was interrupted
        self._is_broken = False  # work within this step has raised in the middle
        self._keeps_outgoing = False  # for the next step: an interrupted one has not handed it out

    @property
    def is_pending(self) -> bool:
        """Whether something is unfinished, noted or not handed out."""
        return bool(self.requests or self.notes or (self._outgoing and (self._open or self._keeps_outgoing)))

    def step(self) -> list[Landing]:
        """Make a step; return what has landed since the last step that returned.

        Raises:
            RuntimeError: another thread makes a step.
        """
        self._check_alone()
        if self._open:
            self._recover()
        elif not self._keeps_outgoing:
            self._outgoing = []
        self._open.append(True)
        self._keeps_outgoing = False
        self.running, self.runs = threading.current_thread(), True
        try:
            try:
                self._advance()
            except Exception as error:
                if _is_interrupt(error):
                    raise KeyboardInterrupt from error
                self._blame(error)
                self._recover()
            self._announce()
        finally:
            self.runs = False
        # One expression: with a line between the two, an interruption there would lose what the step hands out.
        return self._open.clear() or self._outgoing

    def note(self, function: Callable[[], None]) -> None:
        """Have a function called between steps: at once, if no step runs and this thread may run steps."""
        self.notes.add(function)
        if not self.runs and self._may_run:
            self.between_steps(self.notes.take)

    def _check_alone(self) -> None:
        """Raise RuntimeError if another thread is in a step: its mark would be taken for an interrupted one's."""
        running = self.running
        if self.runs and running is not None and running is not threading.current_thread():
            raise RuntimeError(
                f"thread {running.name!r} runs this engine: several threads can share an AsyncLLM, not an LLM"
            )

    @property
    def _may_run(self) -> bool:
        return self.owner is None or self.owner is threading.current_thread()

    def between_steps(self, work: Callable[[], object], *, hands_out: bool = False) -> None:
        """Run work that changes what steps change. Listeners are told what lands or ends in it.

        A note may call this, at the start of the step that takes it.

        Args:
            hands_out: the next step returns that too.
        """
        self._check_alone()
        if self.runs:
            try:
                work()
            except BaseException:
                self._is_broken = True  # its caller may keep the exception to itself
                raise
            return
        keeps = bool(self._open) or self._keeps_outgoing
        if self._open:
            self._recover()
        elif not keeps:
            self._outgoing = []
        self._open.append(True)
        self.running, self.runs = threading.current_thread(), True
        try:
            work()
            self._announce()
        finally:
            self.runs = False
        self._keeps_outgoing = keeps or (hands_out and bool(self._outgoing))
        self._open.clear()

    def take_notes(self) -> bool:
        """Do what was noted, within a step; return whether there was anything. If work has broken off, the engine is
        rebuilt before the step continues."""
        found = self.notes.take()
        if self._is_broken:
            self._recover()
        return found

    def make_whole(self) -> None:
        """Recover, if a step was interrupted and none runs."""
        if self._open and not self.runs and self._may_run:
            self.between_steps(lambda: None)

    def _recover(self) -> None:
        self._mark_handed_out()
        self._is_broken = False
        self.recovers = True
        self._remake()
        self.recovers = False
        self.news[:] = self.requests.values()

    def _announce(self) -> None:
        """Tell listeners what has landed or ended, and hand it out."""
        landings: list[Landing] = []
        for request in dict.fromkeys(self.news):
            first, last = request.num_handed_out, request.landed.num_tokens
            if last > first or (request.is_finished and self._is_registered(request)):
                landings.append(Landing(request, first, last))
        for listen in list(self.listeners):
            listen(landings)
        # A listener may have cut a request at a stop string.
        lasts = [each.request.landed.num_tokens for each in landings]
        cut = [
            each if each.last == last else each._replace(last=last) for each, last in zip(landings, lasts, strict=True)
        ]
        self._outgoing = [*self._outgoing, *cut]
        self._mark_handed_out()
        self.news.clear()

    def _mark_handed_out(self) -> None:
        for request, _, last in self._outgoing:
            request.num_handed_out = last
            if request.status.is_finished and self._is_registered(request):
                del self.requests[request.request_id]

    def _is_registered(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether a library has turned a KeyboardInterrupt, in a function that it called, into this error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

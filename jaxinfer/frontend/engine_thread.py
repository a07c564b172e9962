"""The thread in which an engine lives: other threads give it commands through one queue, and get outputs by mail."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.frontend.client import EngineClient, RunningJob
from jaxinfer.frontend.jobs import Item, Job
from jaxinfer.frontend.mailbox import Mailbox

logger = logging.getLogger(__name__)

# So many steps in a row may raise, although the engine recovers before each: then it is given up.
_MOST_ERRORS_IN_A_ROW = 3
_IDLE_SECONDS = 60.0


class EngineDeadError(RuntimeError):
    """The engine cannot go on; the error that has ended it is the cause."""


@dataclass(eq=False)
class OutputReader:
    """Who waits for the outputs of one request.

    Attributes:
        loop: of the reader, in which `event` is set when something has come.
    """

    engine_id: str
    name: str
    mailbox: Mailbox
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Waiting:
    """A job, and the future that waits for its answer."""

    running: RunningJob[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class EngineThread:
    """Steps one engine for as long as there is work, and delivers what lands.

    No lock is held while a step runs, and a loop is woken once a step. Where the methods may be called by any thread,
    they say so; the others belong to the engine's.

    Args:
        client: of the engine. From now on only this thread may use it, except for its `inputs`.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.error: Exception | None = None  # what later calls raise
        self._inbox = client.inbox()
        self._readers: dict[str, OutputReader] = {}
        self._names: defaultdict[str, set[str]] = defaultdict(set)  # engine ids by the names that users gave
        self._lock = threading.Lock()  # of names
        self._jobs: list[_Waiting] = []
        self._num_errors = 0  # in a row
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="jaxinfer engine", daemon=True)
        client.core.transactions.owner = self._thread
        self._thread.start()

    # For any thread

    def check_alive(self) -> None:
        """Raises RuntimeError if no step will run any more, and says why."""
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error.__cause__

    def note(self, function: Callable[[], None]) -> None:
        """Have something done between two steps. It must not raise."""
        self.check_alive()
        self.client.core.transactions.note(function)

    def add(self, item: Item, reader: OutputReader, *, stream: bool) -> None:
        """Queue a request or a group that was checked."""
        with self._lock:
            self._names[reader.name].add(reader.engine_id)

        def enter() -> None:
            self._readers[reader.engine_id] = reader
            try:
                self.client.add([item], self._inbox, stream=stream)
            except ValueError as error:
                self._end(reader, error)

        self.note(enter)

    def abort(self, name: str) -> None:
        """End all requests of a name."""
        with self._lock:
            ids = tuple(self._names.get(name, ()))
        if ids and self.error is None:
            self.client.core.transactions.note(lambda: self._abort(ids))

    def abort_one(self, engine_id: str) -> None:
        """End one request that nobody reads any more."""
        if self.error is None:
            self.client.core.transactions.note(lambda: self._abort((engine_id,)))

    async def call[T](self, function: Callable[[], T]) -> T:
        """What a function returns, or raises, that runs between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                _resolve(loop, future, error=error)
            else:
                _resolve(loop, future, result)

        self.note(run)
        return await future

    async def answer[T](self, job: Job[T]) -> T:
        """Run a job; a caller that is cancelled takes its requests along."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiting = _Waiting(RunningJob(self.client, job), loop, future)

        def begin() -> None:
            self._jobs.append(waiting)
            self._advance_jobs()

        self.note(begin)
        try:
            return await future
        except asyncio.CancelledError:
            if self.error is None:
                self.client.core.transactions.note(lambda: self._leave(waiting))
            raise

    def stop(self) -> None:
        """Abort what is unfinished, deliver that, and end the thread. Waits for the step that runs."""
        self._stops = True
        self.client.core.transactions.notes.add(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # For the engine's thread

    def _run(self) -> None:
        core = self.client.core
        while not self._stops:
            if not core.has_unfinished_requests():
                self._deliver()  # what delivering has ended: requests of a loop that is closed
                core.transactions.notes.wait(_IDLE_SECONDS)
                continue
            if not self._step():
                return
        self._jobs_fail(RuntimeError("the engine was shut down"))
        core.abort(*[reader.engine_id for reader in self._readers.values()])
        while core.has_unfinished_requests():
            if not self._step():
                return
        self._deliver()
        self._give_up(RuntimeError("the engine was shut down"))

    def _step(self) -> bool:
        """A step; whether there may be a next one."""
        core = self.client.core
        try:
            core.step()
            self._num_errors = 0
        except Exception as error:
            self._num_errors += 1
            core.metrics.num_raised_steps_total += 1
            logger.error("a step has raised, %d in a row", self._num_errors, exc_info=error)
            if core.transactions.recovers or self._num_errors >= _MOST_ERRORS_IN_A_ROW:
                dead = EngineDeadError(f"the engine cannot go on after {type(error).__name__}: {error}")
                dead.__cause__ = error
                self._give_up(dead)
                return False
        self._deliver()
        self._advance_jobs()
        return True

    def _deliver(self) -> None:
        """Put what has landed into mailboxes, and wake each loop once."""
        loops: defaultdict[asyncio.AbstractEventLoop, list[OutputReader]] = defaultdict(list)
        for output in self._inbox.take():
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue  # it was aborted
            reader.mailbox.put(output)
            loops[reader.loop].append(reader)
            if output.finished:
                self._forget(reader)
        self._wake(loops)

    def _wake(self, loops: dict[asyncio.AbstractEventLoop, list[OutputReader]]) -> None:
        for loop, readers in loops.items():
            try:
                loop.call_soon_threadsafe(_set_all, readers)
            except RuntimeError:  # the loop is closed, and nobody is left to read
                self._abort(tuple(reader.engine_id for reader in self._readers.values() if reader.loop is loop))

    def _abort(self, engine_ids: Sequence[str]) -> None:
        self.client.core.abort(*engine_ids)

    def _forget(self, reader: OutputReader) -> None:
        self._readers.pop(reader.engine_id, None)
        with self._lock:
            ids = self._names.get(reader.name)
            if ids is not None:
                ids.discard(reader.engine_id)
                if not ids:
                    del self._names[reader.name]

    def _end(self, reader: OutputReader, error: Exception) -> None:
        """Let a request fail that the engine does not know."""
        self._forget(reader)
        reader.mailbox.fail(error)
        self._wake({reader.loop: [reader]})

    def _advance_jobs(self) -> None:
        for waiting in list(self._jobs):
            try:
                answer = waiting.running.advance()
                if answer is None and not self.client.core.has_unfinished_requests():
                    raise RuntimeError("the engine has nothing left to do, and there is no answer yet")
            except Exception as error:
                self._leave(waiting)
                _resolve(waiting.loop, waiting.future, error=error)
            else:
                if answer is not None:
                    self._leave(waiting)
                    _resolve(waiting.loop, waiting.future, answer.value)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting in self._jobs:
            self._jobs.remove(waiting)
            waiting.running.close()

    def _jobs_fail(self, error: Exception) -> None:
        for waiting in list(self._jobs):
            self._leave(waiting)
            _resolve(waiting.loop, waiting.future, error=error)

    def _give_up(self, error: Exception) -> None:
        """End every request with an error, and refuse what comes later."""
        self.error = error
        for waiting in self._jobs:  # the engine is not to be touched any more
            _resolve(waiting.loop, waiting.future, error=error)
        self._jobs.clear()
        for reader in list(self._readers.values()):
            self._end(reader, error)


def _set_all(readers: Sequence[OutputReader]) -> None:
    for reader in readers:
        reader.event.set()


def _resolve[T](
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: Any = None, *, error: Exception | None = None
) -> None:
    """Resolve a future of another thread's loop, if anybody waits for it still."""

    def resolve() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:
        logger.debug("a loop was closed before an answer came")

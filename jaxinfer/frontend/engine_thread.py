"""The thread that runs an engine. Other threads send it commands through one queue and get outputs in mailboxes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxinfer.engine.errors import ProcessError
from jaxinfer.frontend.client import EngineClient, RunningJob
from jaxinfer.frontend.inspection import EngineInspection, inspect_engine
from jaxinfer.frontend.jobs import Item, Job
from jaxinfer.frontend.mailbox import Mailbox

logger = logging.getLogger(__name__)

# The engine recovers after a step that raises. It is given up after so many of them in a row.
_MOST_ERRORS_IN_A_ROW = 3
_IDLE_SECONDS = 60.0
_TAKING_SECONDS = 1e-3  # the most for which outputs are let go first, before the next launch is prepared


class EngineDeadError(RuntimeError):
    """The engine has failed and cannot recover; the error that has ended it is the cause."""


@dataclass(eq=False)
class OutputReader:
    """The reader of one request's outputs.

    Attributes:
        engine_id: the request's id in the engine.
        name: the request's id as its caller knows it.
        loop: the reader's event loop, in which `event` is set when there are new outputs.
    """

    engine_id: str
    name: str
    mailbox: Mailbox
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Waiting:
    """A running job and the future of its answer."""

    running: RunningJob[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class EngineThread:
    """Thread that steps one engine while there is work, and delivers its outputs.

    No lock is held while a step runs, and each event loop is woken at most once per step.

    Args:
        client: of the engine. From now on only this thread may use it, except for its `inputs`.

    Attributes:
        error: why commands are refused; None while they are accepted.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.error: Exception | None = None
        self._inbox = client.inbox()
        self._readers: dict[str, OutputReader] = {}
        self._names: defaultdict[str, set[str]] = defaultdict(set)  # engine ids by the callers' ids
        self._queued: dict[int, Callable[[Exception], None]] = {}  # called for commands that cannot run any more
        self._num_commands = 0
        self._lock = threading.Lock()  # guards names, commands and the error; a finalizer never takes it
        self._jobs: list[_Waiting] = []
        self._num_errors = 0  # in a row
        self._taken = threading.Event()  # set by a loop whose readers have run
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="jaxinfer engine", daemon=True)
        client.core.transactions.owner = self._thread
        self._thread.start()

    # For any thread

    def check_alive(self) -> None:
        """Raise RuntimeError, with the reason, if commands are refused."""
        if self.error is not None:
            raise _again(self.error)

    def add(self, item: Item, reader: OutputReader, *, stream: bool) -> None:
        """Queue a checked request or group."""

        def enter() -> None:
            self._readers[reader.engine_id] = reader
            try:
                self.client.add([item], self._inbox, stream=stream)
            except ValueError as error:
                self._end(reader, error)

        with self._lock:
            self._names[reader.name].add(reader.engine_id)
        try:
            self._command(enter, partial(self._end, reader))
        except RuntimeError:
            self._forget(reader)
            raise

    def abort(self, name: str) -> None:
        """Abort all requests of a name."""
        self.check_alive()
        with self._lock:
            ids = tuple(self._names.get(name, ()))
        if ids:
            self._note(partial(self._abort, ids))

    def abort_one(self, engine_id: str) -> None:
        """Abort a request whose reader is gone. Finalizers call this, at any point of any thread."""
        self._note(partial(self._abort, (engine_id,)))

    async def call[T](self, function: Callable[[], T]) -> T:
        """Run a function between two steps; returns or raises what the function does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except StopIteration as error:  # a future cannot hold it
                _resolve(loop, future, error=RuntimeError(f"the function raised {error!r}"))
            except BaseException as error:
                _resolve(loop, future, error=error)
            else:
                _resolve(loop, future, result)

        self._command(run, lambda error: _resolve(loop, future, error=error))
        return await future

    async def answer[T](self, job: Job[T]) -> T:
        """Run a job to its answer; its requests are aborted when the caller is cancelled or garbage-collected."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiting = _Waiting(RunningJob(self.client, job), loop, future)
        self._command(partial(self._jobs.append, waiting), lambda error: _resolve(loop, future, error=error))
        try:
            return await future
        except BaseException:
            self._note(partial(self._leave, waiting))
            raise

    async def inspect(self) -> EngineInspection:
        """Count what the engine holds, between two steps."""
        return await self.call(lambda: inspect_engine(self.client.core, len(self._readers)))

    def stop(self) -> None:
        """Refuse further commands; after the running step, abort and deliver unfinished requests and end the thread."""
        with self._lock:
            self.error = self.error or RuntimeError("the engine was shut down")
            self._stops = True
        self._note(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _command(self, function: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """Queue a function to run between two steps; `fail` gets the error if the engine ends before that.

        Raises:
            RuntimeError: commands are refused.
        """
        with self._lock:
            self.check_alive()
            number = self._num_commands
            self._num_commands += 1
            self._queued[number] = fail

        def run() -> None:
            with self._lock:
                is_queued = self._queued.pop(number, None) is not None
            if is_queued:
                function()

        self._note(run)

    def _note(self, function: Callable[[], None]) -> None:
        # Queued even in the engine's own thread: a finalizer may run there, in the middle of a step.
        self.client.core.transactions.notes.add(function)

    # For the engine's thread

    def _run(self) -> None:
        try:
            while not self._stops and self._turn():
                pass
            if self._stops and not isinstance(self.error, EngineDeadError):
                self._shut_down()
        except BaseException as error:  # a fault of this class, or an exit: no caller may wait for ever
            logger.critical("the thread of the engine has ended", exc_info=error)
            self._give_up(_dead(error))

    def _turn(self) -> bool:
        """Wait for work, or run a step; returns whether the engine still lives."""
        core = self.client.core
        if core.has_unfinished_requests() or self._jobs:
            return self._step()
        self._deliver()  # last outputs, also of requests that ended since the latest step
        core.transactions.notes.wait(_IDLE_SECONDS)
        return True

    def _step(self) -> bool:
        """Run a step; returns whether the engine still lives."""
        core = self.client.core
        try:
            core.step()
            self._num_errors = 0
        except Exception as error:
            self._num_errors += 1
            core.metrics.num_raised_steps_total += 1
            logger.error("a step has raised, %d in a row", self._num_errors, exc_info=error)
            is_lost = core.transactions.recovers or isinstance(error, ProcessError)
            if is_lost or self._num_errors >= _MOST_ERRORS_IN_A_ROW:
                self._give_up(_dead(error))
                return False
        self._leave_closed_loops()
        self._deliver()
        self._advance_jobs()
        return True

    def _shut_down(self) -> None:
        core, error = self.client.core, self.error
        assert error is not None
        self._fail_queued(error)
        for waiting in list(self._jobs):
            self._leave(waiting)
            _resolve(waiting.loop, waiting.future, error=_again(error))
        core.abort(*core.scheduler.requests)
        while core.has_unfinished_requests():
            if not self._step():
                return
        self._deliver()
        self._give_up(error)

    def _deliver(self) -> None:
        """Put landed outputs into mailboxes and wake each event loop once."""
        loops: defaultdict[asyncio.AbstractEventLoop, list[OutputReader]] = defaultdict(list)
        for output in self._inbox.take():
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue  # its loop was closed
            reader.mailbox.put(output)
            loops[reader.loop].append(reader)
            if output.finished:
                self._forget(reader)
        self._taken.clear()
        for loop, readers in loops.items():
            _wake(loop, readers, self._taken)
        if loops and self.client.core.launcher.num_in_flight:
            # The device is busy meanwhile; else the loops' threads would wait until the next launch is prepared.
            self._taken.wait(_TAKING_SECONDS)

    def _leave_closed_loops(self) -> None:
        """Abort requests and jobs of closed event loops: their outputs would never be read."""
        readers = [reader for reader in self._readers.values() if reader.loop.is_closed()]
        for reader in readers:
            self._forget(reader)
        if readers:
            self._abort([reader.engine_id for reader in readers])
        for waiting in [waiting for waiting in self._jobs if waiting.loop.is_closed()]:
            self._leave(waiting)

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
        """Fail a request that is not in the engine, or whose engine is dead."""
        self._forget(reader)
        reader.mailbox.fail(_again(error))
        _wake(reader.loop, [reader], self._taken)

    def _advance_jobs(self) -> None:
        for waiting in list(self._jobs):
            if waiting not in self._jobs:
                continue  # advancing another job has ended it
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

    def _give_up(self, error: Exception) -> None:
        """Fail every request and job, and refuse later commands. The engine is not touched any more."""
        with self._lock:
            self.error = error
        self._fail_queued(error)
        for waiting in self._jobs:
            _resolve(waiting.loop, waiting.future, error=_again(error))
        self._jobs.clear()
        for reader in list(self._readers.values()):
            self._end(reader, error)

    def _fail_queued(self, error: Exception) -> None:
        """Fail the commands that have not run; no further ones can be queued."""
        with self._lock:
            queued, self._queued = list(self._queued.values()), {}
        for fail in queued:
            fail(_again(error))


def _dead(error: BaseException) -> EngineDeadError:
    dead = EngineDeadError(f"the engine cannot recover from {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead


def _again(error: Exception) -> Exception:
    """Copy an error for one more caller, so that each has its own traceback."""
    found = type(error)(*error.args)
    found.__cause__ = error.__cause__
    return found


def _wake(loop: asyncio.AbstractEventLoop, readers: Iterable[OutputReader], taken: threading.Event) -> None:
    try:
        loop.call_soon_threadsafe(_set_all, list(readers), taken)
    except RuntimeError:
        logger.debug("a loop was closed before outputs came")  # the next step aborts its requests


def _set_all(readers: Sequence[OutputReader], taken: threading.Event) -> None:
    for reader in readers:
        reader.event.set()
    asyncio.get_running_loop().call_soon(taken.set)  # after the tasks that have been woken


def _resolve[T](
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    result: Any = None,
    *,
    error: BaseException | None = None,
) -> None:
    """Resolve a future of another thread's event loop, unless it is already done."""

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

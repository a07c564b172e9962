"""The outputs of one request, as a task of an event loop reads them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, Self

from jaxinfer.frontend.engine_thread import EngineThread, OutputReader
from jaxinfer.outputs import RequestOutput


class RequestStream:
    """Stream of the outputs of one request: `async for output in stream`.

    The request is aborted, within a step, by `aclose`, when the iterating task ends or is cancelled, when its event
    loop is closed, and when the stream is garbage-collected. A `break` alone does not abort it while anything refers to
    the stream. A slow reader loses nothing: outputs that it has not taken are merged into one.

    Attributes:
        request_id: the caller's, or a generated one.
    """

    def __init__(self, llm: object, thread: EngineThread, reader: OutputReader) -> None:
        self.request_id = reader.name
        self._llm = llm  # keeps the engine running while the stream exists
        self._thread, self._reader, self._is_over = thread, reader, False
        self._abort = weakref.finalize(self, thread.abort_one, reader.engine_id)
        self._abort.atexit = False
        self._task: asyncio.Task[Any] | None = None  # the task that took the latest output
        self._ended: Callable[[asyncio.Task[Any]], None] | None = None  # done callback of that task

    @property
    def finished(self) -> bool:
        """Whether the last output was taken or the stream was closed."""
        return self._is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next output. Cancelling the wait, also by a timeout, aborts the request.

        Raises:
            EngineDeadError: the engine has failed and cannot recover.
            RuntimeError: the engine was shut down.
        """
        self._watch()
        reader = self._reader
        while not self._is_over:
            reader.event.clear()
            try:
                output = reader.mailbox.take()
            except Exception:
                self._end()
                raise
            if output is not None:
                if output.finished:
                    self._end()
                return output
            try:
                await reader.event.wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        raise StopAsyncIteration

    def abort(self) -> None:
        """End the request within a step. Its last output follows, with `finish_reason="abort"` if it was unfinished."""
        self._thread.abort_one(self._reader.engine_id)

    async def aclose(self) -> None:
        """Abort the request if it is unfinished. No more outputs follow."""
        self._abort()
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._abort.detach()
        self._watch_no_more()
        self._reader.event.set()  # wakes another task that waits for an output

    def _watch(self) -> None:
        """Abort when the iterating task ends. It counts from its second output on: some tasks take only one."""
        task = asyncio.current_task()
        if task is not self._task:
            self._watch_no_more()
            self._task = task
        elif task is not None and self._ended is None and not self._is_over:
            own = weakref.ref(self)

            def ended(task: asyncio.Task[Any]) -> None:
                stream = own()
                if stream is not None:
                    stream._abort()
                    stream._end()

            self._ended = ended
            task.add_done_callback(ended)

    def _watch_no_more(self) -> None:
        if self._task is not None and self._ended is not None:
            self._task.remove_done_callback(self._ended)
        self._ended = None

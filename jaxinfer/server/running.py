"""The engine's requests of one request of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from jaxinfer.outputs import BeamSearchOutput, CompletionOutput, EngineFailure, RequestOutput
from jaxinfer.server.errors import ABORTED, ApiError


class Source(Protocol):
    """Outputs of one prompt, as `RequestStream` has them."""

    async def __anext__(self) -> RequestOutput: ...

    def abort(self) -> None: ...

    async def aclose(self) -> None: ...


def aborted() -> ApiError:
    return ApiError(503, "the request was aborted", code=ABORTED)


class SearchSource:
    """The outcome of a beam search of one prompt, as one output.

    Args:
        search: what finds it.
        num_kept: of the best continuations.
    """

    def __init__(self, search: Coroutine[Any, Any, list[BeamSearchOutput]], num_kept: int) -> None:
        self._task, self._num_kept = asyncio.create_task(search), num_kept

    async def __anext__(self) -> RequestOutput:
        await asyncio.wait([self._task])
        if self._task.cancelled():
            raise ApiError(503, "the search was aborted, or has taken longer than requests may", code=ABORTED)
        (found,) = self._task.result()
        parts = [
            CompletionOutput(index, one.text, one.token_ids, one.cumulative_logprob, finish_reason=one.finish_reason)
            for index, one in enumerate(found.sequences[: self._num_kept])
        ]
        return RequestOutput("", found.prompt, found.prompt_token_ids, parts, finished=True)

    def abort(self) -> None:
        self._task.cancel()

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Running:
    """Requests that run until all have ended, or until their time is over; one for each prompt.

    Args:
        ended: makes the error of a request that the server has ended.
    """

    def __init__(self, ended: Callable[[], ApiError] = aborted) -> None:
        self._ended = ended
        self._sources: list[Source] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_late = self._is_aborted = False

    def add(self, source: Source) -> None:
        """Add what runs for the next prompt.

        Raises:
            ApiError: the request was aborted.
        """
        self._sources.append(source)
        if self._is_aborted:
            raise aborted()

    def abort(self) -> None:
        """End what is unfinished."""
        self._is_aborted = True
        for source in self._sources:
            source.abort()

    def end_after(self, seconds: float | None) -> None:
        """End them after so many seconds, as if they had reached their length; None: never."""
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        self._is_late = True
        self.abort()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Outputs as they come, each with the number of its prompt.

        Raises:
            ApiError: a request was ended by what it asked for, or by the server.
            EngineDeadError: the engine has failed and cannot recover.
        """
        if len(self._sources) == 1:
            is_finished = False
            while not is_finished:
                output = await anext(self._sources[0])
                is_finished = output.finished
                yield 0, self._seen(output)
            return
        # One at a time of each stream, which merges those that were not taken yet.
        waiting: dict[asyncio.Task[RequestOutput], int] = {
            asyncio.ensure_future(anext(source)): number for number, source in enumerate(self._sources)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    number = waiting.pop(task)
                    output = task.result()
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(self._sources[number]))] = number
                    yield number, self._seen(output)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _seen(self, output: RequestOutput) -> RequestOutput:
        """An output as clients know it: they know no finish reasons "error" and "abort"."""
        reasons = {part.finish_reason for part in output.outputs}
        if isinstance(output.error, EngineFailure):  # its text is in the log
            raise ApiError(500, "the engine has failed on this request, see the server's log", code="request_failed")
        if "error" in reasons:
            raise ApiError(400, output.error or "the request could not be continued", code="request_failed")
        if "abort" not in reasons:
            return output
        if not self._is_late:
            raise aborted() if self._is_aborted else self._ended()
        parts = [
            replace(part, finish_reason="length") if part.finish_reason == "abort" else part for part in output.outputs
        ]
        return replace(output, outputs=parts)

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        if self._timer is not None:
            self._timer.cancel()
        for source in self._sources:
            await source.aclose()

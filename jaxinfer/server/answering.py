"""From the outputs of requests to responses: one way for whole answers and streams of all endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from jaxinfer.async_llm import EngineDeadError
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import CLIENT_LEFT, EventStream, Reply, unless_gone
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.service import Service


class RunningOf[T](Protocol):
    """What runs for one request of HTTP; see `Running`."""

    def outputs(self) -> AsyncIterator[tuple[int, T]]: ...


class AnswerOf[T](Protocol):
    """Answer of one endpoint, which grows by outputs. Its events are objects of JSON."""

    def begin(self) -> Sequence[dict[str, Any]]:
        """Events before the first output, once the request has been admitted."""
        ...

    def add(self, number: int, output: T) -> Sequence[dict[str, Any]]:
        """Add an output of prompt `number`, and return the events that it brings."""
        ...

    def end(self) -> Sequence[dict[str, Any]]:
        """Events after the last output."""
        ...

    def failed(self, error: ApiError) -> Sequence[dict[str, Any]]:
        """Events of an error that ends the answer."""
        ...

    def encoded(self, events: Sequence[dict[str, Any]]) -> bytes:
        """Events as the stream has them."""
        ...

    def closing(self) -> bytes:
        """The stream's end, also after an error."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer, once all outputs were added."""
        ...


async def respond[T](
    service: Service,
    request: HttpRequest,
    running: AbstractAsyncContextManager[RunningOf[T]],
    answer: AnswerOf[T],
    *,
    is_stream: bool,
) -> App:
    """Run a request, and answer whole or by events.

    Args:
        running: queues the request when it is entered, and aborts what is unfinished at its end.

    Raises:
        ApiError: the request was refused, or has ended with an error before the response began.
    """
    stack = AsyncExitStack()
    runs = await stack.enter_async_context(running)
    if is_stream:
        return EventStream(_events(service, runs, answer), stack, service)
    async with stack:
        found = await unless_gone(request.receive, collected(service, runs, answer))
    if found is None:
        service.note_left()
        return Reply(b"", CLIENT_LEFT)
    return Reply(found)


async def collected[T](service: Service, running: RunningOf[T], answer: AnswerOf[T]) -> dict[str, Any]:
    """Return the whole answer, once the request has ended.

    Raises:
        ApiError: the request has ended with an error.
    """
    try:
        async for number, output in running.outputs():
            answer.add(number, output)
    except (ValueError, RuntimeError) as error:
        raise _of_engine(service, error) from error
    return answer.whole()


async def _events[T](service: Service, running: RunningOf[T], answer: AnswerOf[T]) -> AsyncGenerator[bytes]:
    try:
        if begin := answer.begin():
            yield answer.encoded(begin)
        async for number, output in running.outputs():
            if found := answer.add(number, output):
                yield answer.encoded(found)
        if end := answer.end():
            yield answer.encoded(end)
    except ApiError as error:
        yield answer.encoded(answer.failed(error))
    except (ValueError, RuntimeError) as error:
        yield answer.encoded(answer.failed(_of_engine(service, error)))
    if closing := answer.closing():
        yield closing


def _of_engine(service: Service, error: ValueError | RuntimeError) -> ApiError:
    """What a client is told of an error of the engine: searches and skeletons check their prompts when they begin."""
    if isinstance(error, EngineDeadError):
        service.die()
        return service.unavailable()
    return of_value_error(error) if isinstance(error, ValueError) else ApiError(503, str(error), code="request_failed")

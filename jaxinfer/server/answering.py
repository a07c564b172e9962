"""From the outputs of requests to responses: one way for whole answers and streams of all endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any, Protocol

from jaxinfer.async_llm import EngineDeadError
from jaxinfer.outputs import RequestOutput
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import CLIENT_LEFT, EventStream, Reply, unless_gone
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.service import Service

logger = logging.getLogger("jaxinfer.server")

_MANY_LOGPROBS = 32  # tokens with log probabilities, whose texts take as long as a step of the event loop may


class RunningOf[T](Protocol):
    """What runs for one request of HTTP; see `Running`."""

    def outputs(self) -> AsyncGenerator[tuple[int, T]]: ...


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
        found = await unless_gone(request.receive, _whole_reply(service, runs, answer))
    if found is None:
        service.note_left()
        return Reply(b"", CLIENT_LEFT)
    return found


async def _whole_reply[T](service: Service, running: RunningOf[T], answer: AnswerOf[T]) -> Reply:
    found, is_long = await _collected(service, running, answer)
    return await asyncio.to_thread(Reply, found) if is_long else Reply(found)


async def collected[T](service: Service, running: RunningOf[T], answer: AnswerOf[T]) -> dict[str, Any]:
    """Return the whole answer, once the request has ended.

    Raises:
        ApiError: the request has ended with an error.
    """
    return (await _collected(service, running, answer))[0]


async def _collected[T](service: Service, running: RunningOf[T], answer: AnswerOf[T]) -> tuple[dict[str, Any], bool]:
    """Return the whole answer, and whether it is long. Long ones are written beside the event loop."""
    is_long = False
    async with aclosing(_outputs(service, running)) as outputs:
        async for number, output in outputs:
            if _num_logprobs(output) > _MANY_LOGPROBS:
                is_long = True
                await asyncio.to_thread(answer.add, number, output)
            else:
                answer.add(number, output)
    return await asyncio.to_thread(answer.whole) if is_long else answer.whole(), is_long


def _num_logprobs(output: object) -> int:
    """Return of how many tokens an output has log probabilities."""
    if not isinstance(output, RequestOutput):
        return 0
    return len(output.prompt_logprobs or ()) + sum(len(part.logprobs or ()) for part in output.outputs)


async def _events[T](service: Service, running: RunningOf[T], answer: AnswerOf[T]) -> AsyncGenerator[bytes]:
    try:
        if begin := answer.begin():
            yield answer.encoded(begin)
        async with aclosing(_outputs(service, running)) as outputs:
            async for number, output in outputs:
                if found := answer.add(number, output):
                    yield answer.encoded(found)
        if end := answer.end():
            yield answer.encoded(end)
    except ApiError as error:
        yield answer.encoded(answer.failed(error))
    except Exception:
        logger.exception("a stream has failed")
        yield answer.encoded(answer.failed(ApiError(500, "an internal error, see the server's log")))
    if closing := answer.closing():
        yield closing


async def _outputs[T](service: Service, running: RunningOf[T]) -> AsyncGenerator[tuple[int, T]]:
    """What has run, with errors of the engine, but none of those that read it, as a client is told of them."""
    async with aclosing(running.outputs()) as outputs:
        while True:
            try:
                found = await anext(outputs)
            except StopAsyncIteration:
                return
            except (ValueError, RuntimeError) as error:
                raise _of_engine(service, error) from error
            yield found


def _of_engine(service: Service, error: ValueError | RuntimeError) -> ApiError:
    """What a client is told of an error of the engine: searches and skeletons check their prompts when they begin."""
    if isinstance(error, EngineDeadError):
        service.die()
        return service.unavailable()
    return of_value_error(error) if isinstance(error, ValueError) else ApiError(503, str(error), code="request_failed")

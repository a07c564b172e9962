"""From the outputs of requests to responses: one way for whole answers and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.async_llm import EngineDeadError
from jaxinfer.outputs import RequestOutput
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import CLIENT_LEFT, DONE, EventStream, Reply, event, unless_gone
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.common import Sampling
from jaxinfer.server.running import Running, Source
from jaxinfer.server.service import Service


class AnswerOf(Protocol):
    """Answer of one endpoint, which grows by outputs."""

    def add(self, number: int, output: RequestOutput) -> list[dict[str, Any]]: ...

    def chunk(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]: ...

    def whole(self) -> dict[str, Any]: ...


@dataclass
class Asked:
    """A request that was checked, and the answer that it is to get.

    Attributes:
        prompts: as the engine takes them.
        num_sequences: of each prompt.
        start: queues a prompt.
    """

    prompts: Sequence[Mapping[str, Any]]
    num_sequences: int
    start: Callable[[Any], Awaitable[Source]]
    answer: AnswerOf


async def respond(service: Service, request: HttpRequest, body: Sampling, asked: Asked) -> App:
    """Run a request, and answer as its body asks.

    Raises:
        ApiError: it was refused, or has ended with an error before the response began.
    """
    stack = AsyncExitStack()
    is_stream = bool(body.stream)
    running = await stack.enter_async_context(service.running(asked.prompts, asked.num_sequences, asked.start))
    if is_stream:
        return EventStream(_events(service, running, asked.answer, body), stack, service)
    async with stack:
        answer = await unless_gone(request.receive, _whole(service, running, asked.answer))
    if answer is None:
        service.note_left()
        return Reply(b"", CLIENT_LEFT)
    return Reply(answer)


async def _whole(service: Service, running: Running, answer: AnswerOf) -> dict[str, Any]:
    try:
        async for number, output in running.outputs():
            _check(output)
            answer.add(number, output)
    except ValueError as error:  # of a search, which checks its prompt when it begins
        raise of_value_error(error) from error
    except EngineDeadError as error:
        service.die()
        raise service.unavailable() from error
    return answer.whole()


async def _events(service: Service, running: Running, answer: AnswerOf, body: Sampling) -> AsyncGenerator[bytes]:
    options = body.stream_options
    at_end = options is not None and bool(options.include_usage)
    in_each = options is not None and bool(options.continuous_usage_stats)
    try:
        async for number, output in running.outputs():
            _check(output)
            choices = answer.add(number, output)
            if choices:
                yield b"".join([event(answer.chunk([choice], usage=in_each)) for choice in choices])
        if at_end:
            yield event(answer.chunk([], usage=True))
    except ApiError as error:
        yield event(error.body())
    except RuntimeError as error:
        if isinstance(error, EngineDeadError):
            service.die()
        yield event(ApiError(503, str(error)).body())
    yield DONE


def _check(output: RequestOutput) -> None:
    """Raise ApiError if a request was ended by what it asked for, or by the server."""
    for part in output.outputs:
        if part.finish_reason == "error":
            raise ApiError(400, output.error or "the request could not be continued", code="request_failed")
        if part.finish_reason == "abort":
            raise ApiError(503, "the request was aborted", code="aborted")

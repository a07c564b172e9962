"""Skeleton-of-Thought as an answer of a conversation: the skeleton and its points as choices, or merged into one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from jaxinfer.async_llm import EngineDeadError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError, of_value_error
from jaxinfer.server.events import CLIENT_LEFT, DONE, EventStream, Reply, event, unless_gone
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.service import Service
from jaxinfer.skeleton.output import SkeletonEvent, SkeletonOutput
from jaxinfer.skeleton.plan import ANSWER

# A skeleton's points are samples of one request, as far as seats are concerned.
_NUM_SEQUENCES = 8


class SkeletonAnswer:
    """Answer to one question.

    Args:
        num_prompt_tokens: of the question.
        is_merged: one choice, with the text of all points.
    """

    def __init__(self, envelope: Envelope, num_prompt_tokens: int, *, is_merged: bool) -> None:
        self._envelope, self._is_merged = envelope, is_merged
        self._indices: dict[int | None, int] = {}  # of choices, by the points that they have
        self._begun: dict[int | None, str] = {}  # beginnings of points that may be a marker
        envelope.count_tokens(num_prompt_tokens, 0)

    def chunks(self, new: SkeletonEvent) -> list[dict[str, Any]]:
        """The choices that an event brings: none if the answer is merged at the end."""
        self._envelope.count_tokens(0, new.num_tokens)
        if self._is_merged:
            return []
        found = []
        if new.point not in self._indices:
            self._indices[new.point] = len(self._indices)
            found.append(self._choice(new.point, {"role": "assistant", "content": ""}, None))
        text = new.text if new.point is None else self._without_marker(new)
        delta = {"content": text} if text else {}
        if text or new.finished:
            found.append(self._choice(new.point, delta, "stop" if new.finished else None))
        return found

    def _without_marker(self, new: SkeletonEvent) -> str:
        """The text of a point's event without the marker that its text begins with."""
        before = self._begun.setdefault(new.point, "")
        if before == ANSWER:
            return new.text
        text = (before + new.text).lstrip()
        if ANSWER.startswith(text) and not new.finished and text != ANSWER:
            self._begun[new.point] = text
            return ""
        self._begun[new.point] = ANSWER  # whether it was there or not
        return text.removeprefix(ANSWER)

    def merged(self, output: SkeletonOutput) -> list[dict[str, Any]]:
        """The choices of an answer's end: none unless it is merged."""
        if not self._is_merged:
            return []
        return [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": output.text},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]

    def _choice(self, point: int | None, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        index = self._indices[point]
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "point": point}

    def whole(self, output: SkeletonOutput) -> dict[str, Any]:
        """The answer, once it is there."""
        metrics = output.metrics
        self._envelope.count_tokens(0, metrics.skeleton_tokens + metrics.point_tokens)
        texts: list[tuple[int | None, str, str]] = [(None, output.text, "stop")]
        if not self._is_merged:
            texts = [(None, output.written, "stop")]
            texts += [(point.id, point.text, point.finish_reason or "stop") for point in output.points]
        choices = [
            {
                "index": index, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None,
                "finish_reason": reason, "point": point,
            }
            for index, (point, text, reason) in enumerate(texts)
        ]  # fmt: skip
        return self.wrap("chat.completion", choices, usage=True)

    def wrap(self, kind: str, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        return self._envelope.wrap(kind, choices, usage=usage)


def question_of(body: ChatRequest) -> str:
    """The one message that a skeleton is for.

    Raises:
        ApiError: there are others, or it is no text.
    """
    (message, *others) = body.messages
    parts = message.content if isinstance(message.content, list) else [message.content or ""]
    texts = [part if isinstance(part, str) else part.text or "" for part in parts]
    if others or message.role != "user" or not any(texts):
        raise ApiError(400, "skeleton_of_thought answers one message of a user", "messages")
    return "\n".join(texts)


async def respond_with_skeleton(
    service: Service, request: HttpRequest, body: ChatRequest, params: SamplingParams, answer: SkeletonAnswer
) -> App:
    """Answer by a skeleton and its points.

    Raises:
        ApiError: the request was refused, or has failed before the response began.
    """
    question, events = question_of(body), asyncio.Queue[SkeletonEvent]()
    stack = AsyncExitStack()
    stack.enter_context(service.admitted(_NUM_SEQUENCES, len(question)))
    work = service.llm.skeleton_of_thought(
        question, params, max_parallel_branches=body.max_parallel_branches,
        on_event=events.put_nowait if body.stream else None,
    )  # fmt: skip
    if body.stream:
        task = asyncio.create_task(work)
        stack.push_async_callback(_ended, task)
        return EventStream(_events(service, task, events, answer, body), stack, service)
    async with stack:
        try:
            output = await unless_gone(request.receive, work)
        except ValueError as error:
            raise of_value_error(error) from error
        except EngineDeadError as error:
            service.die()
            raise service.unavailable() from error
    if output is None:
        service.note_left()
        return Reply(b"", CLIENT_LEFT)
    return Reply(answer.whole(output))


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def _events(
    service: Service,
    task: asyncio.Task[SkeletonOutput],
    events: asyncio.Queue[SkeletonEvent],
    answer: SkeletonAnswer,
    body: ChatRequest,
) -> AsyncGenerator[bytes]:
    kind = "chat.completion.chunk"
    try:
        while not (task.done() and events.empty()):
            getting = asyncio.ensure_future(events.get())
            try:
                await asyncio.wait([task, getting], return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    for choice in answer.chunks(getting.result()):
                        yield event(answer.wrap(kind, [choice], usage=False))
            finally:
                getting.cancel()
        for choice in answer.merged(task.result()):
            yield event(answer.wrap(kind, [choice], usage=False))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(answer.wrap(kind, [], usage=True))
    except EngineDeadError as error:
        service.die()
        yield event(ApiError(503, str(error)).body())
    except (ValueError, RuntimeError) as error:
        yield event(ApiError(400, str(error), code="request_failed").body())
    yield DONE

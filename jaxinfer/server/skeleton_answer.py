"""Skeleton-of-Thought as an answer of a conversation: the skeleton and its points as choices, or merged into one."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.envelope import ChunkedAnswer, Envelope
from jaxinfer.server.errors import ABORTED, ApiError
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.common import StreamOptions
from jaxinfer.server.running import aborted
from jaxinfer.server.service import Service
from jaxinfer.skeleton.output import SkeletonEvent, SkeletonOutput
from jaxinfer.skeleton.plan import StreamedPointText

logger = logging.getLogger(__name__)

# A skeleton's points are samples of one request, as far as seats are concerned.
_NUM_SEQUENCES = 8


class SkeletonAnswer(ChunkedAnswer):
    """Answer to one question.

    Args:
        num_prompt_tokens: of the question.
        is_merged: one choice, with the text of all points.
    """

    def __init__(
        self, envelope: Envelope, options: StreamOptions | None, num_prompt_tokens: int, *, is_merged: bool
    ) -> None:
        super().__init__(envelope, options, kind="chat.completion", kind_of_chunk="chat.completion.chunk")
        self._is_merged = is_merged
        self._output: SkeletonOutput | None = None
        self._num_seen = 0  # tokens of events
        self._indices: dict[int | None, int] = {}  # of choices, by the points that they have
        self._texts: defaultdict[int, StreamedPointText] = defaultdict(StreamedPointText)
        envelope.count_tokens(num_prompt_tokens, 0)

    def add(self, number: int, output: SkeletonEvent | SkeletonOutput) -> list[dict[str, Any]]:
        """Add an event or the whole, and return the chunks that it brings: those of a merged answer come at the end."""
        if isinstance(output, SkeletonEvent):
            self._num_seen += output.num_tokens
            self._envelope.count_tokens(0, output.num_tokens)
            return [] if self._is_merged else self._chunks(self._choices_of(output))
        self._output, metrics = output, output.metrics
        self._envelope.count_tokens(0, metrics.skeleton_tokens + metrics.point_tokens - self._num_seen)
        if not self._is_merged:
            return []
        delta = {"role": "assistant", "content": output.text}
        return self._chunks([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": _merged_reason(output)}])

    def _choices_of(self, new: SkeletonEvent) -> list[dict[str, Any]]:
        found = []
        if new.point not in self._indices:
            self._indices[new.point] = len(self._indices)
            found.append(self._choice(new.point, {"role": "assistant", "content": ""}, None))
        text, reason = new.text, "stop"  # of the skeleton, which is given as it was written
        if new.point is not None:
            text, reason = self._texts[new.point].add(text, is_last=new.finished), new.finish_reason or "stop"
        if text or new.finished:
            delta = {"content": text} if text else {}
            found.append(self._choice(new.point, delta, reason if new.finished else None))
        return found

    def _choice(self, point: int | None, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        index = self._indices[point]
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "point": point}

    def whole(self) -> dict[str, Any]:
        """The answer, once it is there."""
        output = self._output
        assert output is not None
        texts: list[tuple[int | None, str, str]] = [(None, output.text, _merged_reason(output))]
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
        return self._whole(choices)


def _merged_reason(output: SkeletonOutput) -> str:
    """Why the text of all points has ended: one that was cut leaves it cut."""
    return "length" if any(point.finish_reason == "length" for point in output.points) else "stop"


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


class SkeletonRunning:
    """A skeleton and its points while they run, as `Running` is for requests."""

    def __init__(self) -> None:
        self._events = asyncio.Queue[SkeletonEvent]()
        self._task: asyncio.Task[SkeletonOutput] | None = None
        self._is_aborted = False

    async def start(self, service: Service, question: str, body: ChatRequest, params: SamplingParams) -> None:
        """Queue it.

        Raises:
            ApiError: it was aborted meanwhile.
            ValueError: the question or its parameters cannot be served.
        """
        self._task = await service.llm.add_skeleton(
            question, params, max_parallel_branches=body.max_parallel_branches,
            on_event=self._events.put_nowait if body.stream else None,
        )  # fmt: skip
        if self._is_aborted:
            raise aborted()

    def abort(self) -> None:
        """End it."""
        self._is_aborted = True
        if self._task is not None:
            self._task.cancel()

    async def outputs(self) -> AsyncGenerator[tuple[int, SkeletonEvent | SkeletonOutput]]:
        """Events as they come, and the whole at the end.

        Raises:
            ApiError: it was aborted.
            ValueError: a point cannot be served.
            RuntimeError: the engine has failed.
        """
        task, events = self._task, self._events
        assert task is not None
        while not (task.done() and events.empty()):
            getting = asyncio.ensure_future(events.get())
            try:
                await asyncio.wait([task, getting], return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield 0, getting.result()
            finally:
                getting.cancel()
        if task.cancelled():
            message = "the skeleton was aborted, or has taken longer than requests may"
            raise ApiError(503, message, code=ABORTED)
        yield 0, task.result()

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        if self._task is None:
            return
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(outcome, Exception):
            logger.debug("a skeleton has ended with an error", exc_info=outcome)


@asynccontextmanager
async def running_skeleton(
    service: Service, body: ChatRequest, params: SamplingParams, num_prompt_tokens: int, names: Sequence[str]
) -> AsyncIterator[SkeletonRunning]:
    """Run a skeleton and its points; at the end of the block, what is unfinished is aborted.

    Raises:
        ApiError: the body has no single question, its parameters cannot be served, or too many requests wait.
    """
    question, running = question_of(body), SkeletonRunning()
    seconds = service.settings.request_timeout
    with service.admitted(_NUM_SEQUENCES, num_prompt_tokens), service.named(names, running):
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, running.abort)
        try:
            with service.queueing():
                await running.start(service, question, body, params)
            yield running
        finally:
            if timer is not None:
                timer.cancel()
            await running.aclose()

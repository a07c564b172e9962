"""`AsyncLLM`: the engine for asyncio, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import numbers
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.beam_search import BeamSearchJob
from jaxinfer.frontend.engine_thread import EngineDeadError, EngineThread, OutputReader
from jaxinfer.frontend.jobs import Item
from jaxinfer.frontend.mailbox import Mailbox
from jaxinfer.frontend.prompts import is_conversation
from jaxinfer.llm import LLM
from jaxinfer.outputs import BeamSearchOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "EngineDeadError", "RequestStream"]

_KINDS = ("delta", "final")


class RequestStream:
    """The outputs of one request as they come: `async for output in stream`.

    The request is aborted, within a step, by `aclose`, when the task that iterates is cancelled or ends, when its loop
    is closed, and when the stream is let go: a `break` alone leaves it running for as long as anything refers to the
    stream. A slow reader misses nothing: what it has not taken is merged into one output.

    Attributes:
        request_id: as the caller gave it, or one that was made up.
    """

    def __init__(self, llm: AsyncLLM, thread: EngineThread, reader: OutputReader) -> None:
        self.request_id = reader.name
        self._llm = llm  # whose engine runs for as long as anything refers to it
        self._reader, self._is_over = reader, False
        self._abort = weakref.finalize(self, thread.abort_one, reader.engine_id)
        self._abort.atexit = False
        self._task: asyncio.Task[Any] | None = None  # that took the latest output
        self._ended: Callable[[asyncio.Task[Any]], None] | None = None  # is told of the end of that task

    @property
    def finished(self) -> bool:
        """Whether its last output was taken, or it was closed."""
        return self._is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. A wait that is cancelled, by a time limit too, aborts the request.

        Raises:
            EngineDeadError: the engine cannot go on.
            RuntimeError: it was shut down.
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

    async def aclose(self) -> None:
        """Abort the request, if it is unfinished. No more outputs come."""
        self._abort()
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._abort.detach()
        self._watch_no_more()
        self._reader.event.set()  # another one that waits for an output

    def _watch(self) -> None:
        """Abort with the end of a task that takes one output after the other; not with that of one made for each."""
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


class AsyncLLM:
    """Text from a language model for many callers at once, each of which awaits its own.

    All methods belong to a running event loop, of which there may be several; a stream belongs to the loop in which it
    was made. Prompts are checked, and refused, in the caller's thread. The engine recovers from failures by itself; if
    it cannot, every request ends with `EngineDeadError`, and so does every later call.

    Args:
        arguments, options: those of `LLM`.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError, ValueError: as of `LLM`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = LLM(*arguments, **options).client
        self._thread = EngineThread(self._client)
        self._stop = weakref.finalize(self, self._thread.stop)
        self._skeletons: dict[str, SkeletonOfThought] = {}

    async def add(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        output_kind: str = "delta",
    ) -> RequestStream:
        """Queue one prompt; its stream, once it is checked and queued.

        Args:
            prompt: as for `LLM.generate`, or a conversation.
            sampling_params: None: `default_sampling_params()`.
            request_id: a name by which it can be aborted, and that its outputs bear; several may have the same. None:
                one that is made up.
            priority: with `scheduling_policy="priority"`; the lowest runs first.
            output_kind: "delta": what is new, as it lands; "final": one output, at the end.

        Raises:
            ValueError: it cannot be served; nothing is queued then.
            EngineDeadError, RuntimeError: the engine cannot go on, or was shut down.
        """
        inputs = self._client.inputs
        if is_conversation(prompt):
            prompt = inputs.render(prompt, 0, {})
        is_stream = _is_stream(output_kind)
        [item] = inputs.requests([prompt], sampling_params, stream=is_stream, priority=_priority(priority))
        return self._queue(item, request_id, stream=is_stream)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        output_kind: str = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt as they come; see `add`. Leaving it aborts the request."""
        stream = await self.add(
            prompt, sampling_params, request_id=request_id, priority=priority, output_kind=output_kind
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        output_kind: str = "delta",
        **template_arguments: Any,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one conversation as they come; see `add`.

        Args:
            template_arguments: passed to the checkpoint's chat template.
        """
        prompt = self._client.inputs.render(messages, 0, template_arguments)
        stream = await self.add(
            prompt, sampling_params, request_id=request_id, priority=priority, output_kind=output_kind
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def generate_branches(
        self,
        prefix: Any,
        suffixes: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        branch_mode: str | None = None,
        *,
        max_parallel_branches: int | None = None,
        predicted_lengths: Sequence[int] | None = None,
        request_id: str | None = None,
        output_kind: str = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of branches of one beginning as they come; see `LLM.generate_branches`."""
        is_stream = _is_stream(output_kind)
        group = self._client.inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=is_stream,
        )  # fmt: skip
        stream = self._queue(group, request_id, stream=is_stream)
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """See `LLM.beam_search`."""
        client = self._client
        job = BeamSearchJob(client.core, client.inputs, client.tokenizer, prompts, params)
        return await self._thread.answer(job)

    async def skeleton_of_thought(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        branch_mode: str | None = None,
        protocol: str = "auto",
        max_parallel_branches: int | None = None,
        skeleton: str | None = None,
        on_event: Callable[[SkeletonEvent], None] | None = None,
    ) -> SkeletonOutput:
        """See `LLM.skeleton_of_thought`; `on_event` is called in the running loop."""
        if protocol not in self._skeletons:
            self._skeletons[protocol] = SkeletonOfThought(self._client, protocol)
        loop = asyncio.get_running_loop()
        tell = None if on_event is None else functools.partial(loop.call_soon_threadsafe, on_event)
        job = self._skeletons[protocol].job(
            question, sampling_params, branch_mode=branch_mode, max_parallel_branches=max_parallel_branches,
            skeleton=skeleton, on_event=tell,
        )  # fmt: skip
        return await self._thread.answer(job)

    async def abort(self, request_id: str) -> None:
        """End all unfinished requests of this name, within a step."""
        self._thread.abort(request_id)

    async def call[T](self, function: Callable[[], T]) -> T:
        """Run a function between two steps, in the engine's thread; what it returns or raises."""
        return await self._thread.call(function)

    async def reset_prefix_cache(self) -> bool:
        """Forget the prefixes that are cached; False if unfinished requests use some of them, which stay."""
        return await self._thread.call(self._client.core.reset_prefix_cache)

    async def warm_up(self, use_tqdm: bool = True) -> None:
        """Compile every program that requests can need, with a progress line that names it. Requests wait meanwhile."""
        await self._thread.call(lambda: self._client.core.warm_up(progress=use_tqdm))

    def get_metrics(self) -> EngineMetrics:
        """Counters since the start and gauges of now.

        Raises:
            EngineDeadError, RuntimeError: the engine cannot go on, or was shut down.
        """
        self._thread.check_alive()
        return self._client.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: this engine has none.
        """
        return self._client.get_tokenizer()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's `generation_config.json` below what is given here."""
        return self._client.default_sampling_params(**given)

    async def shutdown(self) -> None:
        """Abort what is unfinished and end the engine's thread; later calls raise RuntimeError."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop)
        self._stop.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _queue(self, item: Item, request_id: str | None, *, stream: bool) -> RequestStream:
        self._thread.check_alive()
        self._client.core.check([item])
        # A name that no caller can have by chance: `abort` ends all of a name.
        name = uuid.uuid4().hex if request_id is None else request_id
        reader = OutputReader(item.request_id, name, Mailbox(name), asyncio.get_running_loop())
        found = RequestStream(self, self._thread, reader)
        self._thread.add(item, reader, stream=stream)
        return found


def _is_stream(output_kind: str) -> bool:
    if output_kind not in _KINDS:
        raise ValueError(f"output_kind must be one of {', '.join(_KINDS)}, got {output_kind!r}")
    return output_kind == "delta"


def _priority(priority: int) -> int | None:
    """As requests take it: 0, which is the default, needs no policy."""
    if not isinstance(priority, numbers.Integral) or isinstance(priority, bool):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    return int(priority) or None


# The arguments in full, for help texts and editors.
AsyncLLM.__signature__ = inspect.signature(LLM)  # pyright: ignore[reportAttributeAccessIssue]

"""`AsyncLLM`: the engine for asyncio, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.config import EngineConfig
from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.beam_search import BeamSearchJob
from jaxinfer.frontend.engine_thread import EngineDeadError, EngineThread, OutputReader
from jaxinfer.frontend.input_processor import priority_or_none
from jaxinfer.frontend.inspection import EngineInspection
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
    """Stream of the outputs of one request: `async for output in stream`.

    The request is aborted, within a step, by `aclose`, when the iterating task ends or is cancelled, when its event
    loop is closed, and when the stream is garbage-collected. A `break` alone does not abort it while anything refers to
    the stream. A slow reader loses nothing: outputs that it has not taken are merged into one.

    Attributes:
        request_id: the caller's, or a generated one.
    """

    def __init__(self, llm: AsyncLLM, thread: EngineThread, reader: OutputReader) -> None:
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


class AsyncLLM:
    """Asynchronous inference engine: concurrent callers share one engine, which runs in its own thread.

    Methods are called from a running event loop. Several loops may share the engine; a stream belongs to the loop in
    which it was made. Prompts are validated in the caller's thread. The engine recovers from failures by itself; if it
    cannot, every unfinished request and every later call raises `EngineDeadError`.

    Args:
        arguments, options: as for `LLM`.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError, ValueError: as for `LLM`.
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
        """Queue one prompt and return its stream.

        Args:
            prompt: as for `LLM.generate`, or a conversation.
            sampling_params: None: `default_sampling_params()`.
            request_id: id in the outputs and for `abort`; several requests may have the same. None: a generated one.
            priority: with `scheduling_policy="priority"`; the lowest runs first.
            output_kind: "delta": new text and tokens, as they land; "final": one output, at the end.

        Raises:
            ValueError: the prompt cannot be served; nothing is queued then.
            EngineDeadError: the engine has failed and cannot recover.
            RuntimeError: the engine was shut down.
        """
        inputs = self._client.inputs
        if is_conversation(prompt):
            prompt = self.render(prompt)
        is_stream = _is_stream(output_kind)
        await self._compile(sampling_params)
        [item] = inputs.requests([prompt], sampling_params, stream=is_stream, priority=priority_or_none(priority))
        return self._queue(item, request_id, stream=is_stream)

    async def _compile(self, *given: SamplingParams | None) -> None:
        """Compile grammars before their requests are made, in another thread: the event loop does not wait for them."""
        for index, params in enumerate(given):
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                try:
                    await asyncio.to_thread(self._client.inputs.grammar_of, params.structured_outputs)
                except (ValueError, ConstraintError) as error:
                    raise ValueError(f"sampling_params of prompt {index}: {error}") from error

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        output_kind: str = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one prompt as they land; see `add`. Closing the generator aborts the request."""
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
        """Yield the outputs of one conversation as they land; see `add` and `generate`.

        Args:
            template_arguments: passed to the checkpoint's chat template.
        """
        prompt = self.render(messages, **template_arguments)
        stream = await self.add(
            prompt, sampling_params, request_id=request_id, priority=priority, output_kind=output_kind
        )
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def add_branches(
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
    ) -> RequestStream:
        """Queue the branches of one prefix, as `LLM.generate_branches` does, and return their stream; see `add`.

        Raises:
            ValueError: a branch cannot be served; nothing is queued then.
            EngineDeadError: the engine has failed and cannot recover.
            RuntimeError: the engine was shut down.
        """
        is_stream = _is_stream(output_kind)
        given = [sampling_params] if isinstance(sampling_params, SamplingParams) else sampling_params or []
        await self._compile(*given)
        group = self._client.inputs.branches(
            prefix, suffixes, sampling_params, branch_mode=branch_mode, max_parallel=max_parallel_branches,
            predicted=predicted_lengths, stream=is_stream,
        )  # fmt: skip
        return self._queue(group, request_id, stream=is_stream)

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
        """Yield the outputs of the branches of one prefix as they land; see `LLM.generate_branches`."""
        stream = await self.add_branches(
            prefix, suffixes, sampling_params, branch_mode, max_parallel_branches=max_parallel_branches,
            predicted_lengths=predicted_lengths, request_id=request_id, output_kind=output_kind,
        )  # fmt: skip
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search as `LLM.beam_search` does."""
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
        """Answer as `LLM.skeleton_of_thought` does; `on_event` is called in the running loop."""
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
        """Abort all unfinished requests of this id, within a step."""
        self._thread.abort(request_id)

    async def call[T](self, function: Callable[[], T]) -> T:
        """Run a function between two steps in the engine's thread; returns or raises what the function does."""
        return await self._thread.call(function)

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes; returns False if unfinished requests still use some, which stay."""
        return await self._thread.call(self._client.core.reset_prefix_cache)

    async def inspect(self) -> EngineInspection:
        """Count what the engine holds, and check that every page is in exactly one state."""
        return await self._thread.inspect()

    async def warm_up(self, use_tqdm: bool = True) -> None:
        """Compile every program that requests can need, with a progress line for each. Requests wait meanwhile."""
        await self._thread.call(lambda: self._client.core.warm_up(progress=use_tqdm))

    def check_alive(self) -> None:
        """Raise if requests are refused.

        Raises:
            EngineDeadError: the engine has failed and cannot recover.
            RuntimeError: the engine was shut down.
        """
        self._thread.check_alive()

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, with what was left to it."""
        return self._client.inputs.config

    def render(self, messages: Sequence[Any], **template_arguments: Any) -> dict[str, Any]:
        """Return a conversation as a prompt of token ids, by the checkpoint's chat template. Any thread may call it.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        return self._client.inputs.render(messages, 0, template_arguments)

    def get_metrics(self) -> EngineMetrics:
        """Return counters since the start and current gauges.

        Raises:
            EngineDeadError: the engine has failed and cannot recover.
            RuntimeError: the engine was shut down.
        """
        self._thread.check_alive()
        return self._client.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: this engine has none.
        """
        return self._client.get_tokenizer()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Return the given sampling parameters, with defaults from the checkpoint's `generation_config.json`."""
        return self._client.default_sampling_params(**given)

    async def shutdown(self) -> None:
        """Abort unfinished requests and end the engine's thread; later calls raise RuntimeError."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop)
        self._stop.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _queue(self, item: Item, request_id: str | None, *, stream: bool) -> RequestStream:
        self._thread.check_alive()
        self._client.core.check([item])
        # A generated id must equal no caller's, because `abort` ends all requests of an id.
        name = uuid.uuid4().hex if request_id is None else request_id
        reader = OutputReader(item.request_id, name, Mailbox(name), asyncio.get_running_loop())
        found = RequestStream(self, self._thread, reader)
        self._thread.add(item, reader, stream=stream)
        return found


def _is_stream(output_kind: str) -> bool:
    if output_kind not in _KINDS:
        raise ValueError(f"output_kind must be one of {', '.join(_KINDS)}, got {output_kind!r}")
    return output_kind == "delta"


# `LLM`'s arguments in full, for `help` and editors.
AsyncLLM.__signature__ = inspect.signature(LLM)  # pyright: ignore[reportAttributeAccessIssue]

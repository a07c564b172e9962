"""`AsyncLLM`: the engine for asyncio, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from jaxinfer.branching.beam_search import BeamSearchParams
from jaxinfer.cache.page_events import PageEvents
from jaxinfer.config import EngineConfig
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.beam_search import BeamSearchJob
from jaxinfer.frontend.engine_thread import EngineDeadError, EngineThread, OutputReader
from jaxinfer.frontend.input_processor import checked_priority
from jaxinfer.frontend.inspection import EngineInspection
from jaxinfer.frontend.jobs import Item
from jaxinfer.frontend.mailbox import Mailbox
from jaxinfer.frontend.prompts import is_conversation
from jaxinfer.frontend.request_stream import RequestStream
from jaxinfer.llm import LLM
from jaxinfer.outputs import BeamSearchOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.skeleton.answer import SkeletonEvent, SkeletonOfThought, SkeletonOutput
from jaxinfer.skeleton.job import SkeletonJob
from jaxinfer.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "EngineDeadError", "RequestStream"]

_WAIT_SECONDS = 0.02  # between looks at requests that a pause waits for
_KINDS = ("delta", "final")
_MOST_THREADS = 16  # that make requests: most of them wait for grammars


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
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "jaxinfer requests")
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
        await self._prepare(sampling_params)
        [item] = inputs.requests([prompt], sampling_params, stream=is_stream, priority=checked_priority(priority))
        return self._queue(item, request_id, stream=is_stream)

    async def _prepare(self, params: SamplingParams | None) -> None:
        """Compile a grammar and tokenise bad words in another thread, before the request is made."""
        if isinstance(params, SamplingParams) and (params.structured_outputs is not None or params.bad_words):
            await self._beside(self._client.inputs.check_params, params, 0)

    async def _beside[T](self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Do work that may have to compile a grammar in a thread, of which there are others than asyncio's: those are
        needed by all requests, and a few slow grammars would hold them."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *arguments, **options))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        output_kind: str = "delta",
    ) -> AsyncGenerator[RequestOutput]:
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_arguments: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of one conversation as they land; see `add` and `generate`.

        Args:
            chat_template_kwargs, template_arguments: as for `LLM.chat`.
        """
        arguments = self._client.inputs.template_arguments(chat_template_kwargs, template_arguments)
        prompt = self.render(messages, **arguments)
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
        group = await self._beside(
            self._client.inputs.branches, prefix, suffixes, sampling_params, branch_mode=branch_mode,
            max_parallel=max_parallel_branches, predicted=predicted_lengths, stream=is_stream,
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
    ) -> AsyncGenerator[RequestOutput]:
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
        job = await self._beside(
            BeamSearchJob, client.core, client.inputs, client.tokenizer, prompts, params
        )  # compiles its grammar
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
        job = await self._skeleton(
            question, sampling_params, protocol, branch_mode=branch_mode, max_parallel_branches=max_parallel_branches,
            skeleton=skeleton, on_event=on_event,
        )  # fmt: skip
        return await self._thread.answer(job)

    async def add_skeleton(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        protocol: str = "auto",
        max_parallel_branches: int | None = None,
        on_event: Callable[[SkeletonEvent], None] | None = None,
    ) -> asyncio.Task[SkeletonOutput]:
        """Queue one question; returns the task of its answer, which aborts it when it is cancelled.

        Args:
            question, sampling_params, protocol, max_parallel_branches, on_event: as for `skeleton_of_thought`.

        Raises:
            ValueError: the question or its parameters cannot be served; nothing is queued then.
            RuntimeError: the engine has failed, or was shut down.
        """
        job = await self._skeleton(
            question, sampling_params, protocol, max_parallel_branches=max_parallel_branches, on_event=on_event
        )
        self.check_alive()
        return asyncio.create_task(self._thread.answer(job))

    async def _skeleton(
        self,
        question: str,
        params: SamplingParams | None,
        protocol: str,
        *,
        on_event: Callable[[SkeletonEvent], None] | None,
        **options: Any,
    ) -> SkeletonJob:
        """The checked job of a question, made beside the event loop: its first request needs a grammar."""
        if protocol not in self._skeletons:
            self._skeletons[protocol] = SkeletonOfThought(self._client, protocol)
        loop = asyncio.get_running_loop()
        tell = None if on_event is None else functools.partial(loop.call_soon_threadsafe, on_event)
        return await self._beside(self._skeletons[protocol].job, question, params, on_event=tell, **options)

    async def abort(self, request_id: str) -> None:
        """Abort all unfinished requests of this id, within a step."""
        self._thread.abort(request_id)

    async def call[T](self, function: Callable[[], T]) -> T:
        """Run a function between two steps in the engine's thread; returns or raises what the function does."""
        return await self._thread.call(function)

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes; returns False if unfinished requests still use some, which stay."""
        return await self._thread.call(self._client.core.reset_prefix_cache)

    async def cache_events(self) -> PageEvents:
        """Return the events of the prefix cache from now on, which begins empty; see `EngineClient.cache_events`."""
        return await self._thread.call(self._client.cache_events)

    async def update_weights(self, weights: Any, version: Any = None, model: str = "target") -> None:
        """Replace the weights of a model between two steps; see `LLM.update_weights`. Requests wait meanwhile."""
        await self._thread.call(functools.partial(self._client.update_weights, weights, version, model))

    @property
    def weights_version(self) -> Any:
        """The version that the latest update was given, or the number of updates so far."""
        return self._client.core.weights.version

    async def weights_digest(self, model: str = "target") -> str:
        """Return a digest of a model's weights; see `LLM.weights_digest`."""
        return await self._thread.call(functools.partial(self._client.core.weights.digest, model))

    async def pause_generation(self, mode: str = "keep") -> None:
        """Launch nothing until `resume_generation`; requests queue meanwhile. See `LLM.pause_generation`."""
        pausing = self._client.core.pausing
        await self._thread.call(functools.partial(pausing.begin, mode))
        while await self._thread.call(pausing.still_waits):
            await asyncio.sleep(_WAIT_SECONDS)

    async def resume_generation(self, recompute_kv: bool = False) -> None:
        """Continue after a pause; see `LLM.resume_generation`."""
        pausing = self._client.core.pausing
        await self._thread.call(functools.partial(pausing.resume, recompute_kv=recompute_kv))

    @property
    def is_paused(self) -> bool:
        """Whether `pause_generation` was called and `resume_generation` was not."""
        return self._client.core.pausing.is_paused

    @property
    def why_idle(self) -> str | None:
        """Why nothing is launched, in words: a pause, sleep, or weights that are gone; None: launches run."""
        return self._client.core.why_idle()

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV on the device; see `LLM.sleep`."""
        await self._thread.call(functools.partial(self._client.core.sleeping.sleep, level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what sleeps; see `LLM.wake_up`."""
        await self._thread.call(functools.partial(self._client.wake_up, tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV are not on the device."""
        return bool(self._client.core.sleeping.missing)

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
            EngineDeadError, RuntimeError: as for `check_alive`.
        """
        self._thread.check_alive()
        return self._client.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; without one, raise ValueError."""
        return self._client.get_tokenizer()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Return the given sampling parameters, with defaults from the checkpoint's `generation_config.json`."""
        return self._client.default_sampling_params(**given)

    async def shutdown(self) -> None:
        """Abort unfinished requests and end the engine's thread; later calls raise RuntimeError."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)
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

"""`EngineClient`: one engine with its input and output processing, for `LLM`, `AsyncLLM` and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jaxinfer.cache.page_events import PageEvents
from jaxinfer.engine.arrivals import members_of
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.sleeping import checked_tags
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.jobs import Answer, Item, Job
from jaxinfer.frontend.output_processor import Inbox, OutputProcessor
from jaxinfer.frontend.progress import CompileWatcher, GenerationProgress
from jaxinfer.frontend.weights_source import WeightsSource
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.tokenizer import Tokenizer

_DRAWN = 72  # most characters drawn for one node of the prefix cache


class EngineClient:
    """Client of one engine: turns prompts into requests, and landed tokens into outputs.

    Only the thread that steps the engine may call its methods; any thread may use `inputs`.

    Attributes:
        core: the engine.
        inputs: makes and checks requests.
        tokenizer: of prompts and outputs; None: both are token ids.

    Args:
        source: what the weights were loaded with.
    """

    def __init__(
        self,
        core: EngineCore,
        inputs: InputProcessor,
        tokenizer: Tokenizer | None,
        source: WeightsSource,
    ) -> None:
        self.core, self.inputs, self.tokenizer, self._source = core, inputs, tokenizer, source
        self._processor = OutputProcessor(core, tokenizer)
        core.landing_listeners.append(self._processor.process)

    @property
    def has_readers(self) -> bool:
        """Whether a request's last output has not landed yet."""
        return self._processor.has_followers

    def inbox(self) -> Inbox:
        """Return an inbox for a new reader of outputs."""
        return self._processor.inbox()

    def add(self, items: Sequence[Item], inbox: Inbox, *, stream: bool) -> None:
        """Queue requests and groups, all of them or none; their outputs go to `inbox`.

        Args:
            stream: outputs hold new text and tokens, as they land; otherwise each is whole and comes at the end.

        Raises:
            ValueError: one of them cannot be served; nothing is queued then.
        """
        for item in items:
            if isinstance(item, RequestGroup):
                self._processor.follow_group(item, inbox, stream=stream)
            else:
                self._processor.follow(item, inbox, stream=stream)
        try:
            self.core.add(items)
        except ValueError:
            self._processor.forget([member.request_id for item in items for member in members_of(item)])
            raise

    def step(self) -> None:
        """Run one step of the engine if there is work.

        Raises:
            RuntimeError: the weights are not whole: nothing is launched until an update.
        """
        core = self.core
        if core.has_unfinished_requests():
            core.step()
            if (
                core.has_unfinished_requests()
                and core.sleeping.reason() is None
                and (reason := core.weights.obstacle())
            ):
                raise RuntimeError(reason)

    def run(self, items: Sequence[Item], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end; returns outputs in the order of `items`."""
        done: dict[str, RequestOutput] = {}
        with GenerationProgress(len(items), enabled=use_tqdm) as progress:
            for output in self.outputs(items, progress, stream=False):
                done[output.request_id] = output
                progress.update(output)
        return [done[item.request_id] for item in items]

    def outputs(self, items: Sequence[Item], watcher: CompileWatcher, *, stream: bool) -> Iterator[RequestOutput]:
        """Run requests to their end and yield outputs as they land; leaving early aborts unfinished requests.

        Steps serve all requests of the engine: outputs of other callers' requests go to their inboxes.
        """
        self._check_running()
        inbox = self.inbox()
        unfinished = {item.request_id for item in items}
        with self._showing_compiles(watcher):
            try:
                self.add(items, inbox, stream=stream)
                while unfinished:
                    outputs = inbox.take()
                    for output in outputs:
                        if output.finished:
                            unfinished.discard(output.request_id)
                        yield output
                    if not outputs:  # more outputs may have landed in steps of other callers
                        self._step_for(unfinished, watcher)
            finally:
                self.core.abort(*unfinished)

    def answer[T](self, job: Job[T], watcher: CompileWatcher) -> T:
        """Run a job to its answer; leaving early, also by an exception, aborts all of its requests.

        Raises:
            ValueError, RuntimeError: as the job raises them.
        """
        running = RunningJob(self, job)
        with self._showing_compiles(watcher), contextlib.closing(running):
            while (found := running.advance()) is None:
                self._step_for([job.name], watcher)
            return found.value

    @contextlib.contextmanager
    def _showing_compiles(self, watcher: CompileWatcher) -> Iterator[None]:
        """Tell a watcher of compiles, until none is shown any more."""
        listeners = self.core.compile_listeners
        listeners.append(watcher.compiling)
        try:
            yield
        finally:
            listeners.remove(watcher.compiling)
            watcher.compiled()

    def _check_running(self) -> None:
        """Raise RuntimeError with the reason if nothing is launched: a wait would have no end."""
        reason = self.core.why_idle()
        if reason is not None:
            raise RuntimeError(reason)

    def _step_for(self, unfinished: Sequence[str] | set[str], watcher: CompileWatcher) -> None:
        self._check_running()
        if not self.core.has_unfinished_requests():
            raise RuntimeError(f"the engine has nothing left to do, and has no end of {sorted(unfinished)}")
        self.core.step()
        watcher.compiled()

    def update_weights(self, weights: Any, version: Any, model: str) -> None:
        """Replace the weights of a model; see `LLM.update_weights`."""
        self._source.update(self.core.weights, weights, version, model)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Wake the engine up; see `LLM.wake_up`."""
        sleeping = self.core.sleeping
        were_dropped = sleeping.level == 2 and "weights" in checked_tags(tags) & sleeping.missing
        if were_dropped:  # before they count as awake: reading may fail
            self._source.reload(self.core.weights)
        sleeping.wake_up(tags)

    def cache_events(self) -> PageEvents:
        """Return the events of the prefix cache from now on. It is cleared first, and pages of salted requests are not
        told of.

        Raises:
            ValueError: the engine has no prefix cache.
        """
        cache = self.core.prefix_cache
        if cache is None:
            raise ValueError("the engine has no prefix cache, whose events could be told")
        self.core.reset_prefix_cache()
        events = PageEvents(self.core.config.page_size, _is_unsalted)
        cache.continue_events(events)
        return events

    def draw_prefix_cache(self) -> str:
        """Draw the tree of cached prefixes with their text, or with token ids if there is no tokenizer."""
        tokenizer = self.tokenizer

        def show(tokens: list[int]) -> str:
            if tokenizer is None:
                return _shortened(" ".join(map(str, tokens)))
            return repr(_shortened(tokenizer.decode(tokens, skip_special_tokens=False)))

        cache = self.core.prefix_cache
        return "prefix caching is off" if cache is None else cache.dump(show)

    def abort(self, *request_ids: str) -> int:
        """Abort requests and groups by id; returns how many sequences were unfinished."""
        return len(self.core.abort(*request_ids))

    def get_metrics(self) -> EngineMetrics:
        """Return counters since the start and current gauges."""
        return self.core.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: this engine has none.
        """
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer: give tokenizer=...")
        return self.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the generation config's, or else the model config's."""
        return self.inputs.eos_token_ids

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Return the given sampling parameters, with defaults from the checkpoint's `generation_config.json`."""
        return self.inputs.default_sampling_params(**given)


class RunningJob[T]:
    """A job whose requests run in an engine. It is advanced between steps.

    Args:
        client: of the engine.
        job: one that has not begun.
    """

    def __init__(self, client: EngineClient, job: Job[T]) -> None:
        self._client, self._job = client, job
        self._inbox = client.inbox()
        self._has_begun = self._is_closed = False
        self._unfinished: set[str] = set()

    def advance(self) -> Answer[T] | None:
        """Hand new outputs to the job and queue the requests that it asks for; returns the answer once there is one.

        Raises:
            ValueError, RuntimeError: as the job raises them; the caller then calls `close`.
        """
        assert not self._is_closed, f"{self._job.name} was given up"
        job = self._job
        outputs = self._inbox.take()
        self._unfinished.difference_update([output.request_id for output in outputs if output.finished])
        found = job.take(outputs) if self._has_begun else job.begin()
        self._has_begun = True
        if isinstance(found, Answer):
            return found
        if found:
            self._unfinished.update([item.request_id for item in found])
            self._client.add(found, self._inbox, stream=job.stream)
        return None

    def close(self) -> None:
        """Abort the job and its unfinished requests."""
        self._is_closed = True
        self._job.abort()
        self._client.core.abort(*self._unfinished)


def _shortened(text: str) -> str:
    return text if len(text) <= _DRAWN else f"{text[: _DRAWN // 2]} … {text[-_DRAWN // 2 :]}"


def _is_unsalted(namespace: Hashable) -> bool:
    """Whether a namespace of the prefix cache, which begins with the salt of its requests, has none."""
    return isinstance(namespace, tuple) and namespace[0] is None

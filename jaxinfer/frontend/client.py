"""`EngineClient`: one engine with what stands before and behind it, for `LLM`, `AsyncLLM` and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.engine.arrivals import members_of
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.jobs import Answer, Item, Job
from jaxinfer.frontend.output_processor import Inbox, OutputProcessor
from jaxinfer.frontend.progress import CompileWatcher, GenerationProgress
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.tokenizer import Tokenizer


class EngineClient:
    """Turns prompts into requests of one engine, and what lands for them into outputs.

    Its methods belong to the thread that steps the engine; `inputs` may be used by any.

    Attributes:
        core: the engine.
        inputs: makes and checks requests.
        tokenizer: of prompts and outputs; None: both are token ids.
    """

    def __init__(self, core: EngineCore, inputs: InputProcessor, tokenizer: Tokenizer | None) -> None:
        self.core, self.inputs, self.tokenizer = core, inputs, tokenizer
        self._processor = OutputProcessor(core, tokenizer)
        core.landing_listeners.append(self._processor.process)
        self._vocabulary = None if core.constraints is None else core.constraints.vocabulary

    @property
    def has_readers(self) -> bool:
        """Whether an output of a request is still to come, or to be taken."""
        return self._processor.has_followers

    def inbox(self) -> Inbox:
        """An inbox for a new reader of outputs."""
        return self._processor.inbox()

    def add(self, items: Sequence[Item], inbox: Inbox, *, stream: bool) -> None:
        """Queue requests and groups, all of them or none; their outputs come to `inbox`.

        Args:
            stream: outputs have what is new, as it lands; otherwise each is whole, and comes at the end.

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
        """Run one step of the engine, if there is work."""
        if self.core.has_unfinished_requests():
            self.core.step()

    def run(self, items: Sequence[Item], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their end; outputs in the order of `items`."""
        done: dict[str, RequestOutput] = {}
        with GenerationProgress(len(items), enabled=use_tqdm) as progress:
            for output in self.outputs(items, progress, stream=False):
                done[output.request_id] = output
                progress.update(output)
        return [done[item.request_id] for item in items]

    def outputs(self, items: Sequence[Item], watcher: CompileWatcher, *, stream: bool) -> Iterator[RequestOutput]:
        """Run requests to their end and yield outputs as they come; leaving early aborts what is unfinished.

        Steps serve all requests of the engine: outputs of other callers' requests go to their inboxes.
        """
        inbox = self.inbox()
        unfinished = {item.request_id for item in items}
        listeners = self.core.compile_listeners
        listeners.append(watcher.compiling)
        try:
            self.add(items, inbox, stream=stream)
            while unfinished:
                outputs = inbox.take()
                for output in outputs:
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
                if not outputs:  # more may have landed in steps of other callers
                    self._step_for(unfinished, watcher)
        finally:
            self.core.abort(*unfinished)
            listeners.remove(watcher.compiling)
            watcher.compiled()

    def answer[T](self, job: Job[T], watcher: CompileWatcher) -> T:
        """Run what takes several requests to its answer; leaving early, by an exception too, aborts all of them.

        Raises:
            ValueError, RuntimeError: as the job says.
        """
        listeners = self.core.compile_listeners
        listeners.append(watcher.compiling)
        running = RunningJob(self, job)
        try:
            while (found := running.advance()) is None:
                self._step_for([job.name], watcher)
            return found.value
        finally:
            running.close()
            listeners.remove(watcher.compiling)
            watcher.compiled()

    def _step_for(self, unfinished: Sequence[str] | set[str], watcher: CompileWatcher) -> None:
        if not self.core.has_unfinished_requests():
            raise RuntimeError(f"the engine has nothing left to do, and has no end of {sorted(unfinished)}")
        self.core.step()
        watcher.compiled()

    def abort(self, *request_ids: str) -> int:
        """End requests, or what is unfinished of groups, by id; how many sequences end."""
        return len(self.core.abort(*request_ids))

    def get_metrics(self) -> EngineMetrics:
        """Counters since the start and gauges of now."""
        return self.core.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: this engine has none.
        """
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer")
        return self.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the generation config's, or else the model config's."""
        return self.inputs.eos_token_ids

    @property
    def vocabulary(self) -> Vocabulary:
        """What each token adds to a text.

        Raises:
            ValueError: the engine has no tokenizer, or one whose tokens' bytes are not known here.
        """
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.from_tokenizer(self.get_tokenizer(), self.inputs.model_config.vocab_size)
        return self._vocabulary

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's `generation_config.json` below what is given here."""
        return self.inputs.default_sampling_params(**given)


class RunningJob[T]:
    """A job whose requests are in an engine. It is advanced between steps.

    Args:
        client: of the engine.
        job: has not begun.
    """

    def __init__(self, client: EngineClient, job: Job[T]) -> None:
        self._client, self._job = client, job
        self._inbox = client.inbox()
        self._has_begun = self._is_closed = False
        self._unfinished: set[str] = set()

    def advance(self) -> Answer[T] | None:
        """Hand what has come to the job and queue what it asks for; the answer, once it has one.

        Raises:
            ValueError, RuntimeError: as the job says; the caller closes it then.
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
        """Abort what is unfinished of the job."""
        self._is_closed = True
        self._job.abort()
        self._client.core.abort(*self._unfinished)

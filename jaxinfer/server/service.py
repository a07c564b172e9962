"""The engine as endpoints use it: prompts, requests that were admitted, and the phases of its life."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Any, Protocol

from jaxinfer.async_llm import AsyncLLM, EngineDeadError
from jaxinfer.server.admission import Admission
from jaxinfer.server.errors import ApiError, context_message, of_value_error
from jaxinfer.server.running import Running, Source
from jaxinfer.server.settings import ServerSettings

# Phases, each with the reason that requests are refused for.
LOADING, READY, DRAINING, DEAD = "loading", "ready", "draining", "dead"
_REASONS = {
    LOADING: "the model is loading",
    DRAINING: "the server is shutting down",
    DEAD: "the engine has failed and cannot recover",
}
# Of one request: each has a copy of its prompt.
MOST_SEQUENCES = 4096
_RETRY_AFTER = {LOADING: 2, DRAINING: 5, DEAD: 5}

type Prompt = str | Sequence[int]


class Ends(Protocol):
    """What runs for one request of HTTP, and can be ended."""

    def abort(self) -> None: ...


class Service:
    """One engine and its state.

    Attributes:
        phase: "loading", "ready", "draining" or "dead".
        model_names: the served ones; the first is in answers.
        created: when the server started, in seconds since 1970.
    """

    def __init__(self, settings: ServerSettings, model: str) -> None:
        self.settings, self.phase = settings, LOADING
        self.model_names = list(settings.served_model_names) or [model]
        self.created = int(time.time())
        self.fingerprint = f"jaxinfer-{version('jaxinfer')}"
        self._llm: AsyncLLM | None = None
        self._admission: Admission | None = None
        self._is_dead = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # in which the end of the engine is waited for
        self._named: defaultdict[str, list[Ends]] = defaultdict(list)
        self.num_left = 0  # clients that have left before the end of their answers

    def open(self, llm: AsyncLLM) -> None:
        """Take requests from now on."""
        config = llm.config
        digest = hashlib.sha256(repr((self.model_names[0], config)).encode()).hexdigest()[:8]
        self.fingerprint += f"-{digest}"
        self._llm = llm
        self._admission = Admission(
            config.max_num_seqs, self.settings.max_waiting_requests, self.settings.max_waiting_tokens
        )
        if self.phase == LOADING:
            self.phase = READY

    @property
    def llm(self) -> AsyncLLM:
        """The engine; any thread may ask for it.

        Raises:
            ApiError: it takes no requests now.
        """
        if self.phase == READY and self._llm is not None:
            try:
                self._llm.check_alive()
            except EngineDeadError:
                self.die()
            else:
                return self._llm
        raise self.unavailable()

    def check_ready(self) -> None:
        """Raise ApiError unless requests are taken now."""
        _ = self.llm

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        try:
            self.check_ready()
        except ApiError:
            return False
        return True

    @property
    def loaded(self) -> AsyncLLM | None:
        """The engine in any phase; None: it is loading."""
        return self._llm

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return 0 if self._admission is None else self._admission.num_taken

    @property
    def num_refused(self) -> int:
        """Requests that were refused because too many waited."""
        return 0 if self._admission is None else self._admission.num_refused

    def note_left(self) -> None:
        """Note that a client has left before the end of its answer."""
        self.num_left += 1

    def unavailable(self) -> ApiError:
        return ApiError(503, _REASONS[self.phase], code=self.phase, retry_after=_RETRY_AFTER[self.phase])

    def die(self) -> None:
        """Note that the engine cannot recover. Any thread may call it."""
        self.phase = DEAD
        if self._loop is None:
            self._is_dead.set()
        else:
            self._loop.call_soon_threadsafe(self._is_dead.set)

    async def until_dead(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._is_dead.wait()

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless a request names a served model, or none."""
        if name and name not in self.model_names:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", param="model", code="model_not_found")

    def template(self) -> str:
        """The model's chat template; empty: it has none."""
        found = self.llm.get_tokenizer().hf.chat_template
        return found if isinstance(found, str) else ""

    def check_length(self, num_tokens: int, param: str) -> None:
        """Raise ApiError if a prompt and an answer together have too many tokens."""
        most = self.llm.config.max_model_len
        if num_tokens > most:
            raise ApiError(400, context_message(num_tokens, most), param, "context_length_exceeded")

    @contextmanager
    def admitted(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """Count a request as taken until the end of the block.

        Raises:
            ApiError: too many wait, or none are taken now.
        """
        self.check_ready()
        admission = self._admission
        assert admission is not None
        ticket = admission.enter(num_sequences, num_tokens)
        try:
            yield
        finally:
            admission.leave(ticket)

    @contextmanager
    def named(self, names: Sequence[str], running: Ends) -> Iterator[None]:
        """Let `abort` find a request by any of these names until the end of the block."""
        for name in names:
            self._named[name].append(running)
        try:
            yield
        finally:
            for name in names:
                self._named[name].remove(running)
                if not self._named[name]:
                    del self._named[name]

    def abort(self, name: str) -> None:
        """End the requests of a name, of which there may be several or none."""
        for running in list(self._named.get(name, ())):
            running.abort()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Let errors of what the engine is asked for within the block be those that a client is told."""
        try:
            yield
        except ValueError as error:
            raise of_value_error(error) from error
        except RuntimeError as error:
            if isinstance(error, EngineDeadError):
                self.die()
            if self.phase == READY:
                raise
            raise self.unavailable() from error

    @asynccontextmanager
    async def running(
        self,
        prompts: Sequence[Mapping[str, Any]],
        num_sequences: int,
        start: Callable[[Any], Awaitable[Source]],
        names: Sequence[str],
    ) -> AsyncIterator[Running]:
        """Run requests; at the end of the block, those that are unfinished are aborted.

        Args:
            prompts: as `AsyncLLM.add` takes them.
            num_sequences: of each prompt.
            start: queues a prompt.
            names: by which `abort` finds the request.

        Raises:
            ApiError: they cannot be served, or too many wait.
        """
        if len(prompts) * num_sequences > MOST_SEQUENCES:
            raise ApiError(
                400, f"{len(prompts)} prompts of {num_sequences} choices are more than {MOST_SEQUENCES} sequences",
                "branches" if len(prompts) == 1 else "prompt",
            )  # fmt: skip
        num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        running = Running(self.unavailable)
        with self.admitted(len(prompts) * num_sequences, num_tokens), self.named(names, running):
            try:
                with self.queueing():
                    for prompt in prompts:
                        running.add(await start(prompt))
                        await asyncio.sleep(0)
                running.end_after(self.settings.request_timeout)
                yield running
            finally:
                await running.aclose()

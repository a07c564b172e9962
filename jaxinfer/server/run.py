"""A server's process: it binds, loads, warms up, serves, and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.server.app import build_app
from jaxinfer.server.kv_events import KVEventPublisher
from jaxinfer.server.packages import App, H11Protocol, Receive, Scope, Send, h11, uvicorn
from jaxinfer.server.service import DRAINING, LOADING, Service
from jaxinfer.server.settings import ServerSettings

logger = logging.getLogger("jaxinfer.server")

EXIT_DEAD = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLOSING_SECONDS = 5
_LOOK_SECONDS = 0.02
_MOST_AHEAD = 1 << 16  # bytes
_MOST_HEADER_BYTES = 4 << 20


class _Uvicorn(uvicorn.Server):
    """uvicorn without its handlers of signals: the process has one owner of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Http(H11Protocol):
    """HTTP/1.1 that takes a client whose bytes turn out to be none of HTTP for one that has left.

    Without it, uvicorn tells such a client 400 whether or not its request was answered already, and the application
    still answers; both raise errors, which are logged.

    The application may end a connection by `scope["abort"]`: to close one whose client takes nothing would wait for it.

    What a client sends before its request is answered is read, within a bound: uvicorn would read nothing, and not
    notice that the client has left.

    A client that takes nothing of its answer for `read_timeout` seconds loses its connection: uvicorn would keep the
    rest of a whole answer for ever.
    """

    def __init__(self, *arguments: Any, read_timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._read_timeout = read_timeout
        self._look: asyncio.TimerHandle | None = None  # at what is not taken yet
        self._num_resumed = 0
        served = self.app

        async def with_abort(scope: Scope, receive: Receive, send: Send) -> None:
            scope["abort"] = self._abort
            await served(scope, receive, send)

        self.app = with_abort
        self._num_ahead = 0  # bytes that came before the answer to a request

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        self._num_ahead = self._num_ahead + len(data) if self._is_answering else 0
        if self._num_ahead > _MOST_AHEAD:
            self._abort()
        else:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_resumed += 1

    def _look_later(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and self._look is None:
            before = self.cycle, self._num_resumed, left
            self._look = self.loop.call_later(self._read_timeout, self._look_at_rest, *before)

    def _look_at_rest(self, cycle: Any, num_resumed: int, before: int) -> None:
        """Abort if the client has taken nothing of what was left before; what is written meanwhile hides what it
        takes, and waits for the next look."""
        self._look = None
        left, is_same = self.transport.get_write_buffer_size(), cycle is self.cycle and num_resumed == self._num_resumed
        if left and left >= before and is_same and (self.flow.write_paused or cycle.response_complete):
            logger.info("a client has taken nothing of its answer for %g seconds", self._read_timeout)
            self._abort()
        else:
            self._look_later()

    def _abort(self) -> None:
        self.transport.abort()
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


class ServerProcess:
    """One server from its start to its end.

    Args:
        settings: the server's.
        options: of the engine, as `AsyncLLM` takes them.
        model: the name of the model, unless the settings have others.
    """

    def __init__(self, settings: ServerSettings, options: Mapping[str, Any], model: str) -> None:
        self._settings, self._options = settings, options
        self._service = Service(settings, model)
        self._num_signals = 0
        self._signalled = asyncio.Event()
        self._status = 0
        self._failure: BaseException | None = None  # why the model is not loaded
        self._events: KVEventPublisher | None = None

    async def run(self, listening: Callable[[str], None] | None = None) -> int:
        """Serve until a signal or the engine's end; returns the process's exit code.

        Args:
            listening: called with the address once requests are answered, by 503 as long as the model loads.

        Raises:
            Exception: the model cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signal)
        bound = _bound(self._settings)
        server = _server(build_app(self._service), self._settings.read_timeout)
        serving = asyncio.create_task(server.serve([bound]))
        loading = asyncio.create_task(self._load())
        ending = [asyncio.create_task(self._signalled.wait()), asyncio.create_task(self._service.until_dead())]
        host, port = bound.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("listening on %s", address)
        if listening is not None:
            listening(address)
        try:
            await asyncio.wait([*ending, serving, loading], return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is None:
                await asyncio.wait([*ending, serving], return_when=asyncio.FIRST_COMPLETED)
            await self._end(loading)
        finally:
            for task in ending:
                task.cancel()
            llm = self._service.loaded
            if llm is not None:
                await llm.shutdown()  # requests that still run end with an error, which their clients are told
            if self._events is not None:
                self._events.close()
            await self._until_idle(_CLOSING_SECONDS)
            server.should_exit = True
            await serving
        if self._failure is not None:
            raise self._failure
        return self._status

    def _signal(self) -> None:
        self._num_signals += 1
        self._signalled.set()
        logger.info("a signal to stop" if self._num_signals == 1 else "another signal: stopping at once")

    async def _load(self) -> None:
        llm = await asyncio.to_thread(lambda: AsyncLLM(**self._options))
        if self._settings.kv_events_endpoint:
            self._events = KVEventPublisher(
                await llm.cache_events(), self._settings.kv_events_endpoint, self._settings.kv_events_replay_endpoint,
                topic=self._settings.kv_events_topic,
            )  # fmt: skip
        warm_up = self._settings.warm_up
        if warm_up == "full":
            await llm.warm_up(use_tqdm=sys.stderr.isatty())
        self._service.open(llm)
        # What a model has made lives until the end: to look through it takes a tenth of a second, and stops everything.
        gc.collect()
        gc.freeze()
        logger.info("ready: %s", ", ".join(self._service.model_names))

    async def _end(self, loading: asyncio.Task[None]) -> None:
        """Let running requests end, unless the engine is dead or another signal comes."""
        service = self._service
        if loading.done() and loading.exception() is not None:
            self._failure = loading.exception()
            return
        if service.phase not in (LOADING,) and self._num_signals == 0:
            self._status = EXIT_DEAD
            logger.error("the engine is dead")
            return
        service.phase = DRAINING
        logger.info("no more requests are taken, %d are running", service.num_running)
        await self._until_idle(self._settings.shutdown_timeout, most_signals=1)
        # A thread that loads cannot be stopped; what it makes is shut down.
        while not loading.done():
            if self._num_signals > 1:
                os._exit(self._status)
            await asyncio.wait([loading], timeout=_LOOK_SECONDS)

    async def _until_idle(self, seconds: float, *, most_signals: int | None = None) -> None:
        """Wait for running requests; not after more signals than so many."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._service.num_running and loop.time() < end:
            if most_signals is not None and self._num_signals > most_signals:
                return
            await asyncio.sleep(_LOOK_SECONDS)


def _bound(settings: ServerSettings) -> socket.socket:
    """A socket that listens already, so that requests while the model loads are answered."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    found.setblocking(False)
    return found


def _server(app: App, read_timeout: float) -> Any:
    config = uvicorn.Config(
        app, http=functools.partial(_Http, read_timeout=read_timeout), log_config=None, access_log=False,
        lifespan="off", h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        server_header=False, date_header=False, timeout_graceful_shutdown=_CLOSING_SECONDS, timeout_keep_alive=30,
    )  # fmt: skip
    return _Uvicorn(config)

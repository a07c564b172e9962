"""Responses of HTTP: JSON, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

from jaxinfer.server.packages import Receive, Scope, Send
from jaxinfer.server.settings import ServerSettings

logger = logging.getLogger("jaxinfer.server")

_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


# Some clients end lines at these characters too.
_LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}


def compact(value: Any) -> str:
    """A value as JSON on one line."""
    return _encode(value)


def event(value: Any, name: str = "") -> bytes:
    """An event; an empty name: it has none."""
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {compact(value).translate(_LINE_ENDS)}\n\n".encode()


def named_event(value: Any) -> bytes:
    """An event that is named by its type."""
    return f"event: {value['type']}\n".encode() + event(value)


DONE = b"data: [DONE]\n\n"
CLIENT_LEFT = 499  # for the log: such a response goes nowhere


class Reply:
    """A whole response.

    Args:
        content: what is sent as JSON; bytes are sent as they are.
    """

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._status = status
        self._body = content if isinstance(content, bytes) else compact(content).encode()
        kind = {"content-type": "application/json"} if self._body else {}
        self._headers = {**kind, "content-length": str(len(self._body)), **(headers or {})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self._status, "headers": _encoded(self._headers)})
        body = b"" if scope["method"] == "HEAD" else self._body
        await send({"type": "http.response.body", "body": body})


class Watcher(Protocol):
    """What is told of streams."""

    settings: ServerSettings

    def note_left(self) -> None: ...


class EventStream:
    """A response that sends events as they come, until its client has left.

    The client is asked for nothing: events that it does not take wait in its own connection, and the generator is not
    asked for more meanwhile.

    Args:
        events: closed at the end, also when the client has left.
        resources: closed then too, even if no event was ever asked for.
        watcher: has the settings, and is told of a client that has left.
    """

    def __init__(self, events: AsyncGenerator[bytes], resources: AsyncExitStack, watcher: Watcher) -> None:
        self._events, self._resources, self._watcher = events, resources, watcher
        self._heartbeat = watcher.settings.heartbeat_seconds
        self._read_timeout = watcher.settings.read_timeout
        self._since, self._is_sending = time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.create_task(self._write(send)),
            asyncio.create_task(_until_gone(receive)),
            asyncio.create_task(self._watch(send)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done() or isinstance(tasks[0].exception(), OSError):
                self._watcher.note_left()
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
            await self._resources.aclose()
        if isinstance(results[-1], TimeoutError) and "abort" in scope:
            logger.info("a client has taken nothing of its stream for %g seconds", self._read_timeout)
            scope["abort"]()
            return
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _encoded(_EVENT_HEADERS)})
        async for piece in self._events:
            self._since, self._is_sending = time.monotonic(), True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._since, self._is_sending = time.monotonic(), False
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, send: Send) -> None:
        """Send comments while there are no events; raise TimeoutError if the client takes none. One timer looks after
        all events of a stream: a timer of its own would cost an event a tenth of its time."""
        while True:
            limit = self._read_timeout if self._is_sending else self._heartbeat
            seconds = time.monotonic() - self._since
            if seconds < limit:
                await asyncio.sleep(min(limit - seconds, self._read_timeout))
            elif self._is_sending:
                raise TimeoutError
            else:
                async with asyncio.timeout(self._read_timeout):
                    await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
                self._since = time.monotonic()


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine; None if the client leaves before, which cancels it."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

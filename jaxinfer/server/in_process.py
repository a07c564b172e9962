"""Requests to the server's application within its process, without HTTP between."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.server.packages import App

logger = logging.getLogger(__name__)

_MOST_MESSAGES_AHEAD, _SECONDS_TO_LEAVE = 16, 5.0


@dataclass(frozen=True)
class AsgiRequest:
    """A request.

    Attributes:
        prompt: text that a router by prefixes compares; it is no part of the request.
    """

    path: str
    method: str = "GET"
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""
    prompt: str = ""

    @property
    def scope(self) -> MutableMapping[str, Any]:
        """The request as ASGI has it, without the body."""
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method, "scheme": "http",
            "path": self.path, "raw_path": self.path.encode(), "query_string": self.query, "root_path": "",
            "client": None, "server": None, "headers": list(self.headers),
        }  # fmt: skip


async def answer(app: App, asked: AsgiRequest) -> AsyncIterator[MutableMapping[str, Any]]:
    """Yield the messages of ASGI that answer a request. A reader that leaves is a client that disconnects."""
    messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue(_MOST_MESSAGES_AHEAD)
    has_left = asyncio.Event()
    is_read = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": asked.body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if not has_left.is_set():
            await messages.put(message)

    async def run() -> None:
        try:
            await app(asked.scope, receive, send)
        finally:
            if not has_left.is_set():
                await messages.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running  # what it has raised
    finally:
        has_left.set()
        while not messages.empty():  # it may wait for room
            messages.get_nowait()
        if not running.done():
            await asyncio.wait([running], timeout=_SECONDS_TO_LEAVE)
        if not running.cancel() and not running.cancelled() and (error := running.exception()) is not None:
            logger.debug("a request whose client had left", exc_info=error)


async def post(app: App, url: str, body: dict[str, Any], request_id: str) -> tuple[int, dict[str, Any]]:
    """Post a body, and return the status and the answer."""
    content = json.dumps(body).encode()
    headers = (
        (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()),
        (b"x-request-id", request_id.encode()),
    )  # fmt: skip
    status, pieces = 0, list[bytes]()
    async for message in answer(app, AsgiRequest(url, "POST", headers=headers, body=content)):
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))
    return status, json.loads(b"".join(pieces))

"""Requests to the server's application, without HTTP between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from jaxinfer.server.packages import App


async def post(app: App, url: str, body: dict[str, Any], request_id: str) -> tuple[int, dict[str, Any]]:
    """Post a body, and return the status and the answer."""
    content = json.dumps(body).encode()
    given = iter([{"type": "http.request", "body": content, "more_body": False}])
    status, pieces = 0, list[bytes]()

    async def receive() -> MutableMapping[str, Any]:
        message = next(given, None)
        if message is None:
            await asyncio.get_running_loop().create_future()  # the client never leaves
        assert message is not None
        return message

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    scope: MutableMapping[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "headers": [
            (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
    }  # fmt: skip
    await app(scope, receive, send)
    return status, json.loads(b"".join(pieces))

"""Clients that take nothing of their streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from jaxinfer.server.events import EventStream
from jaxinfer.server.run import _server
from jaxinfer.server.settings import ServerSettings


class Watcher:
    settings = ServerSettings(read_timeout=0.3, heartbeat_seconds=60.0)
    num_left = 0

    def note_left(self) -> None:
        self.num_left += 1


async def endless() -> AsyncGenerator[bytes]:
    while True:
        yield b"data: " + b"x" * 60_000 + b"\n\n"


def test_connections_of_clients_that_take_nothing_are_closed(caplog):
    watcher, bound = Watcher(), socket.create_server(("127.0.0.1", 0))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(endless(), AsyncExitStack(), watcher)(scope, receive, send)

    async def run() -> None:
        server = _server(app)
        serving = asyncio.create_task(server.serve([bound]))
        clients = [socket.create_connection(bound.getsockname()) for _ in range(3)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            while watcher.num_left < len(clients) or server.server_state.connections:
                await asyncio.sleep(0.02)
        server.should_exit = True
        await serving
        for client in clients:
            with contextlib.suppress(OSError):
                client.close()

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

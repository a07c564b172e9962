"""Clients that take nothing of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from jaxinfer.server.events import EventStream, Reply
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
        server = _server(app, 60.0)
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


WHOLE = Reply(b"x" * (24 << 20))  # more than the buffers of sockets hold


@contextlib.asynccontextmanager
async def whole_answers(read_timeout: float) -> AsyncGenerator[tuple[Any, tuple[str, int]]]:
    """A server of one large answer, and its address."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = _server(WHOLE, read_timeout)
    serving = asyncio.create_task(server.serve([bound]))
    async with asyncio.timeout(30):
        yield server, bound.getsockname()
        server.should_exit = True
        await serving


def test_whole_answers_of_which_nothing_is_taken_are_dropped(caplog):
    async def run() -> None:
        async with whole_answers(0.3) as (server, address):
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
                for client, more in zip(clients, ("", "connection: close\r\n", ""), strict=True):
                    client.sendall(f"GET / HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode())
                clients[2].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 4)
                while server.server_state.total_requests < len(clients) or server.server_state.connections:
                    await asyncio.sleep(0.02)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_slow_client_gets_its_whole_answer():
    async def run() -> None:
        async with whole_answers(0.4) as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            begin, num_bytes = time.monotonic(), 0
            while piece := await reader.read(1 << 19):
                num_bytes += len(piece)
                await asyncio.sleep(0.02)  # slowly
            assert num_bytes > 24 << 20 and time.monotonic() - begin > 0.8
            writer.close()

    asyncio.run(run())

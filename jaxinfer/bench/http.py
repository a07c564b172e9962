"""A small client of HTTP/1.1 over asyncio: an exchange a connection, bodies as they come, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

# Most bytes of a line: heads, and events, which may hold the log probabilities of many tokens.
_MOST_LINE = 1 << 24
_PIECE = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where a server is, and the path that its API begins with.

    Raises:
        ValueError: a URL is none of http or https.
    """

    host: str
    port: int
    is_secure: bool = False
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"an address is written http://HOST:PORT/PATH or https://..., got {url!r}")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_secure else 80), is_secure, parts.path.rstrip("/"))

    def encode(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A request as it is sent, with a body of JSON."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        given = {"host": f"{host}:{self.port}", "accept": "*/*", "connection": "close"}
        if body is not None:
            given |= {"content-type": "application/json", "content-length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in {**given, **(headers or {})}.items()]
        head = "\r\n".join([f"{method} {self.path}{path} HTTP/1.1", *lines, "", ""])
        return head.encode("latin-1") + (body or b"")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, ssl=self.is_secure or None, limit=_MOST_LINE)


@dataclass
class Response:
    """A response whose body was not read yet.

    Attributes:
        headers: by their names in lower case.
    """

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Self:
        """Read a head.

        Raises:
            EOFError: the connection has ended before its end.
            ValueError: it is none of HTTP/1.
        """
        while True:
            version, _, rest = (await _line(reader)).partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
                raise ValueError(f"not a response of HTTP/1: {version[:40]} {rest[:40]}")
            headers = {}
            while line := await _line(reader):
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
            status = int(rest[:3])
            if status >= 200:  # those before announce it
                return cls(status, headers, reader)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            EOFError: the connection has ended before the body's end.
        """
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await _line(self.reader)).partition(";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            while await _line(self.reader):
                pass  # trailers
            return
        left = int(self.headers["content-length"]) if "content-length" in self.headers else None
        while left is None or left > 0:
            piece = await self.reader.read(_PIECE if left is None else min(left, _PIECE))
            if not piece:
                if left is None:
                    return
                raise EOFError(f"the connection has ended {left} bytes before the body")
            left = None if left is None else left - len(piece)
            yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: it is none.
        """
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[str]:
        """Data of the body's server-sent events; comments and names are left out."""
        buffer, data = bytearray(), []
        async for piece in self.pieces():
            buffer += piece
            *lines, rest = buffer.split(b"\n")
            buffer = bytearray(rest)
            for line in lines:
                line = line.removesuffix(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" ").decode())
                elif not line and data:
                    yield "\n".join(data)
                    data = []


@contextlib.asynccontextmanager
async def exchange(
    address: Address, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send a request on a connection of its own, which is closed at the end of the block.

    Args:
        body: what is sent as JSON; None: nothing.

    Raises:
        OSError, EOFError: the server cannot be reached, or has closed the connection.
        ValueError: the response is none of HTTP/1.
    """
    reader, writer = await address.connect()
    try:
        writer.write(address.encode(method, path, None if body is None else json.dumps(body).encode(), headers))
        await writer.drain()
        yield await Response.read(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _line(reader: asyncio.StreamReader) -> str:
    """A line of a head.

    Raises:
        EOFError: the connection has ended before its end.
        ValueError: it is too long.
    """
    try:
        found = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("a line of a response is too long") from error
    return found.decode("latin-1").rstrip("\r\n")

"""A client of a soak: sends requests, reads answers, and notes what has come of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench.http import Address, Response
from soaking.answers import READERS
from soaking.asked import Asked, Request
from soaking.choices import BrokenAnswerError, Reader, code_of
from soaking.comparison import EQUAL, TIE, compare
from soaking.requests import KINDS
from soaking.tally import Tally

_SMALL_BUFFER = 2048
FULL, ABORTED = "the queue was full", "aborted"


@dataclass(frozen=True)
class Setting:
    """What all clients of a soak share.

    Attributes:
        expected: of each request, its answer.
        num_places: requests that the server takes at once, running and waiting.
    """

    address: Address
    key: str
    requests: Sequence[Request]
    expected: Sequence[Mapping[str, Any]]
    num_places: int
    tally: Tally


class Connection:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def response(self) -> Response:
        return await Response.read(self.reader)

    def end_writing(self) -> None:
        self._writer.write_eof()

    def reset(self) -> None:
        """Close it such that the other side gets an error, not an end."""
        own = self._writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


class Client:
    """One client, which does one thing after the other.

    Args:
        setting: shared with the others.
        rng: for its choices.

    Attributes:
        manner: how it behaves now, for the tally.
    """

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self.setting, self.rng, self.manner = setting, rng, ""
        self._by_kind: dict[str, list[Request]] = {}
        for request in setting.requests:
            self._by_kind.setdefault(request.kind, []).append(request)

    def pick(
        self, kind: str | None = None, *, may_stream: bool = False, fits: Callable[[Asked], bool] = lambda asked: True
    ) -> Request:
        """One of the requests, of a kind, or of any that has no manner of its own by the kinds' weights.

        Args:
            may_stream: only one that can be streamed.
            fits: only one that fits.
        """
        kinds = [each for each in KINDS if not each.has_manner]
        while True:
            name = kind or self.rng.choices(kinds, [each.weight for each in kinds])[0].name
            found = self.rng.choice(self._by_kind[name])
            if (found.asked.may_stream or not may_stream) and fits(found.asked):
                return found

    def encoded(
        self,
        request: Request,
        *,
        stream: bool = False,
        name: str | None = None,
        body: Mapping[str, Any] | None = None,
        **headers: str,
    ) -> bytes:
        """A request as it is sent.

        Args:
            name: its id.
            body: in place of its own.
            headers: with underscores for hyphens.
        """
        given = {**(request.asked.body if body is None else body), **({"stream": True} if stream else {})}
        more = {"x-request-id": name} if name else {}
        more |= {key.replace("_", "-"): value for key, value in headers.items()}
        return self.http("POST", request.asked.path, json.dumps(given).encode(), more)

    def http(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None) -> bytes:
        """Any exchange's request, with the key."""
        given = {"authorization": f"Bearer {self.setting.key}", **(headers or {})}
        return self.setting.address.encode(method, path, body, given)

    @contextlib.asynccontextmanager
    async def connection(self, *, is_slow: bool = False) -> AsyncIterator[Connection]:
        """A connection, closed at the end of the block.

        Args:
            is_slow: it takes little at a time.
        """
        address = self.setting.address
        if is_slow:
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
            own.setblocking(False)
            await asyncio.get_running_loop().sock_connect(own, (address.host, address.port))
            reader, writer = await asyncio.open_connection(sock=own, limit=_SMALL_BUFFER)
        else:
            reader, writer = await address.connect()
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    # What comes of requests

    def note(self, outcome: str) -> None:
        self.setting.tally.note(self.manner, outcome)

    def fail(self, reason: str, **details: Any) -> None:
        self.setting.tally.fail(self.manner, reason, **details)

    async def is_refused(self, response: Response) -> bool:
        """Note a response that is none of success; returns whether it was one."""
        self.setting.tally.statuses[response.status] += 1
        if response.status == 200:
            return False
        body = await response.body()
        error = error_of(body)
        if is_full(response, body):
            self.note(FULL)
        elif response.status == 503 and code_of(error) == "aborted" and self.manner == "abort by name":
            self.note(ABORTED)
        else:
            self.fail(f"status {response.status}: {body[:500]!r}", retry_after=response.headers.get("retry-after"))
        return True

    async def finish(self, request: Request, response: Response, *, seconds_between_events: float = 0.0) -> bool:
        """Read an answer to its end and compare it with the expected one; returns whether there was one to its end."""
        reader = await self.read(request, response, seconds_between_events=seconds_between_events)
        if reader is None:
            return False
        self.judge(request, reader)
        return True

    async def read(self, request: Request, response: Response, *, seconds_between_events: float = 0.0) -> Reader | None:
        """Read an answer to its end; None: there is none, which was noted."""
        if await self.is_refused(response):
            return None
        reader = READERS[request.asked.path]()
        try:
            await self._read(reader, response, seconds_between_events)
        except BrokenAnswerError as error:
            if error.code == "aborted" and self.manner == "abort by name":
                self.note(ABORTED)
            else:
                self.fail(str(error), request=request.number, kind=request.kind, code=error.code)
            return None
        return reader

    async def _read(self, reader: Reader, response: Response, pause: float) -> None:
        if not response.headers["content-type"].startswith("text/event-stream"):
            reader.read_whole(await response.json())
            return
        async for event in response.events():
            reader.add(event)
            if pause:
                await asyncio.sleep(pause)
        if not reader.is_over:
            raise BrokenAnswerError("the stream has ended without its last event")

    def judge(self, request: Request, reader: Reader, *, part: str | None = None) -> str:
        """Note whether an answer is the expected one; returns the verdict.

        Args:
            part: of what is expected, where a request is several.
        """
        expected = self.setting.expected[request.number]
        verdict = compare(expected if part is None else expected[part], reader.answer)
        self.setting.tally.compared[request.asked.path, "streamed" if reader.is_streamed else "whole"] += 1
        if verdict == TIE:
            self.setting.tally.ties[f"{request.kind} {request.number}"] += 1
        if verdict in (EQUAL, TIE):
            self.note(verdict)
        else:
            self.fail(verdict, request=request.number, kind=request.kind, **({"part": part} if part else {}))
        return verdict


def is_full(response: Response, body: bytes) -> bool:
    """Whether a response says that the queue is full, and when to try again."""
    return response.status == 503 and code_of(error_of(body)) == "queue_full" and "retry-after" in response.headers


def error_of(body: bytes) -> dict[str, Any]:
    """The error in a body of JSON; empty: it has none."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(body).get("error")
        return found if isinstance(found, dict) else {}
    return {}

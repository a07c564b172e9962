"""A client of a soak: sends requests, reads answers, and notes what has come of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench.http import Address, Response
from soaking.answers import EQUAL, TIE, Answer, BrokenAnswerError, StreamedAnswer, compare, whole_answer
from soaking.requests import KINDS, Request
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

    def pick(self, kind: str | None = None, *, may_stream: bool = False) -> Request:
        """One of the requests, of a kind, or of any by the kinds' weights.

        Args:
            may_stream: only one that can be streamed.
        """
        while True:
            name = kind or self.rng.choices(KINDS, [each.weight for each in KINDS])[0].name
            found = self.rng.choice(self._by_kind[name])
            if found.asked.may_stream or not may_stream:
                return found

    def encoded(self, request: Request, *, stream: bool = False, name: str | None = None, **headers: str) -> bytes:
        """A request as it is sent.

        Args:
            name: its id.
            headers: with underscores for hyphens.
        """
        body = request.asked.body | ({"stream": True} if stream else {})
        more = {"x-request-id": name} if name else {}
        more |= {key.replace("_", "-"): value for key, value in headers.items()}
        return self.http("POST", request.asked.path, json.dumps(body).encode(), more)

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
        elif response.status == 503 and error.get("code") == "aborted" and self.manner == "abort by name":
            self.note(ABORTED)
        else:
            self.fail(f"status {response.status}: {body[:500]!r}", retry_after=response.headers.get("retry-after"))
        return True

    async def finish(self, request: Request, response: Response, *, seconds_between_events: float = 0.0) -> None:
        """Read an answer to its end and compare it with the expected one."""
        if await self.is_refused(response):
            return
        try:
            answer = await self._answer(request, response, seconds_between_events)
        except BrokenAnswerError as error:
            if error.code == "aborted" and self.manner == "abort by name":
                self.note(ABORTED)
            else:
                self.fail(str(error), request=request.number, kind=request.kind, code=error.code)
            return
        self.judge(request, answer)

    async def _answer(self, request: Request, response: Response, pause: float) -> Answer:
        if not response.headers["content-type"].startswith("text/event-stream"):
            return whole_answer(request.asked.path, await response.json())
        streamed = StreamedAnswer(request.asked.path)
        async for event in response.events():
            streamed.add(event)
            if pause:
                await asyncio.sleep(pause)
        if not streamed.is_over:
            raise BrokenAnswerError("the stream has ended without [DONE]")
        return streamed.answer

    def judge(self, request: Request, answer: Answer) -> None:
        """Note whether an answer is the expected one."""
        verdict = compare(self.setting.expected[request.number], answer)
        if verdict == TIE:
            self.setting.tally.ties[f"{request.kind} {request.number}"] += 1
        if verdict in (EQUAL, TIE):
            self.note(verdict)
        else:
            self.fail(verdict, request=request.number, kind=request.kind)


def is_full(response: Response, body: bytes) -> bool:
    """Whether a response says that the queue is full, and when to try again."""
    return response.status == 503 and error_of(body).get("code") == "queue_full" and "retry-after" in response.headers


def error_of(body: bytes) -> dict[str, Any]:
    """The error in a body of JSON; empty: it has none."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(body).get("error")
        return found if isinstance(found, dict) else {}
    return {}

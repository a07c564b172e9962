"""What clients of a soak do, each manner with how often."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from soaking.answers import READERS
from soaking.asked import Request
from soaking.bad import BAD, NO_HTTP, encoded
from soaking.choices import BrokenAnswerError, Reader
from soaking.client import FULL, Client, Connection, error_of, is_full
from soaking.stored import cancel_background, continue_stored, poll_background

_HUGE = (32 << 20) + 1000  # bytes, more than a server takes by default
_LEFT = "left"


@dataclass(frozen=True)
class Manner:
    """One of the ways in which clients behave.

    Attributes:
        weight: how often, relative to the others.
        run: does it once, and notes what has come of it.
    """

    name: str
    weight: int
    run: Callable[[Client], Awaitable[None]]


async def read_whole(client: Client) -> None:
    request = client.pick()
    async with client.connection() as connection:
        await connection.send(client.encoded(request))
        await client.finish(request, await connection.response())


async def read_stream(client: Client) -> None:
    request = client.pick(may_stream=True)
    async with client.connection() as connection:
        await connection.send(client.encoded(request, stream=True))
        await client.finish(request, await connection.response())


async def read_slowly(client: Client) -> None:
    """Read a stream with a small buffer and pauses, so that the server cannot send all that it has."""
    request = client.pick(may_stream=True)
    async with client.connection(is_slow=True) as connection:
        await connection.send(client.encoded(request, stream=True))
        await client.finish(request, await connection.response(), seconds_between_events=client.rng.uniform(0.01, 0.1))


async def send_in_pieces(client: Client) -> None:
    """Send head and body in pieces that end anywhere."""
    request = client.pick()
    data = client.encoded(request, stream=request.asked.may_stream)
    async with client.connection() as connection:
        places = sorted(client.rng.sample(range(1, len(data)), min(8, len(data) - 1)))
        for begin, end in zip([0, *places], [*places, len(data)], strict=True):
            await connection.send(data[begin:end])
            await asyncio.sleep(client.rng.uniform(0, 0.02))
        await client.finish(request, await connection.response())


async def keep_connection(client: Client) -> None:
    """Send several requests, one after the other, on one connection."""
    async with client.connection() as connection:
        for _ in range(3):
            request = client.pick()
            stream = request.asked.may_stream and client.rng.random() < 0.5
            await connection.send(client.encoded(request, stream=stream, connection="keep-alive"))
            response = await connection.response()
            if not await client.finish(request, response) or response.headers.get("connection") == "close":
                return


async def pipeline(client: Client) -> None:
    """Send two requests at once on one connection: their answers come in their order."""
    first, second = client.pick(), client.pick()
    async with client.connection() as connection:
        await connection.send(client.encoded(first, connection="keep-alive") + client.encoded(second))
        for request in (first, second):
            response = await connection.response()
            if not await client.finish(request, response) and response.status == 200:
                return  # what is left of a broken answer comes before the next one


async def leave_at_once(client: Client) -> None:
    request = client.pick()
    async with client.connection() as connection:
        await connection.send(client.encoded(request, stream=request.asked.may_stream and client.rng.random() < 0.5))
        _leave(client, connection)


async def leave_soon(client: Client) -> None:
    """Leave at a random time: the request waits, is in its prompt, runs, or has ended."""
    request = client.pick()
    async with client.connection() as connection:
        await connection.send(client.encoded(request, stream=request.asked.may_stream and client.rng.random() < 0.5))
        await asyncio.sleep(client.rng.expovariate(1 / 0.1))
        _leave(client, connection)


async def leave_in_prompt(client: Client) -> None:
    """Leave while a long prompt is computed."""
    async with client.connection() as connection:
        await connection.send(client.encoded(client.pick("long prompt"), stream=True))
        await asyncio.sleep(client.rng.uniform(0, 0.05))
        _leave(client, connection)


async def leave_in_stream(client: Client) -> None:
    """Leave after a random number of events."""
    limit = client.rng.randint(1, 12)
    request = client.pick(may_stream=True)
    await _leave_when(client, request, lambda reader, count: count >= limit)


async def leave_in_call(client: Client) -> None:
    """Leave within a tool call."""
    request = client.pick(fits=lambda asked: "tools" in asked.offline)
    await _leave_when(client, request, lambda reader, count: reader.is_in_call)


async def _leave_when(client: Client, request: Request, is_time: Callable[[Reader, int], bool]) -> None:
    """Read a stream until it is time to leave; one that ends before is judged."""
    async with client.connection() as connection:
        await connection.send(client.encoded(request, stream=True))
        response = await connection.response()
        if await client.is_refused(response):
            return
        reader, count = READERS[request.asked.path](), 0
        async for event in response.events():
            reader.add(event)
            count += 1
            if not reader.is_over and is_time(reader, count):
                _leave(client, connection)
                return
        if not reader.is_over:
            raise BrokenAnswerError("the stream has ended without its last event")
        client.judge(request, reader)


def _leave(client: Client, connection: Connection) -> None:
    """Note that a client leaves; the end of the block closes its connection, unless it is reset here."""
    if client.rng.random() < 0.5:
        connection.reset()
    client.note(_LEFT)


async def half_close(client: Client) -> None:
    """Close the own half of a connection after sending. The answer comes, or the server takes it for a leave."""
    request = client.pick()
    async with client.connection() as connection:
        await connection.send(client.encoded(request))
        connection.end_writing()
        try:
            response = await connection.response()
        except (EOFError, OSError):
            client.note("taken for one that leaves")
        else:
            await client.finish(request, response)


async def stop_in_body(client: Client) -> None:
    """Leave in the middle of the request itself."""
    data = client.encoded(client.pick())
    async with client.connection() as connection:
        await connection.send(data[: client.rng.randrange(1, len(data))])
        await asyncio.sleep(client.rng.uniform(0, 0.2))
        _leave(client, connection)


async def say_nothing(client: Client) -> None:
    """Hold a connection on which nothing is asked, or half a head."""
    async with client.connection() as connection:
        if client.rng.random() < 0.5:
            await connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-")
        await asyncio.sleep(client.rng.uniform(0.5, 3))
        _leave(client, connection)


async def abort_by_name(client: Client) -> None:
    """Abort a request by its id while it waits or runs."""
    request, name = client.pick(), f"soak-{uuid.uuid4().hex}"
    async with client.connection() as connection:
        stream = request.asked.may_stream and client.rng.random() < 0.5
        await connection.send(client.encoded(request, stream=stream, name=name))
        await asyncio.sleep(client.rng.expovariate(1 / 0.1))
        async with client.connection() as other:
            await other.send(client.http("POST", "/abort_requests", encoded({"request_ids": [name]})))
            response = await other.response()
            if response.status != 200:
                client.fail(f"an abort has status {response.status}: {await response.body()!r}")
        await client.finish(request, await connection.response())


async def ask_wrongly(client: Client) -> None:
    bad = client.rng.choice(BAD)
    async with client.connection() as connection:
        await connection.send(client.http(bad.method, bad.path, encoded(bad.body), dict(bad.headers)))
        response = await connection.response()
        client.setting.tally.statuses[response.status] += 1
        body = await response.body()
        if is_full(response, body):  # which some faults are found after
            client.note(FULL)
        elif response.status in bad.statuses and error_of(body).get("message"):
            client.note(f"status {response.status}")
        else:
            client.fail(f"{bad.name}: status {response.status}: {body[:300]!r}")


async def speak_no_http(client: Client) -> None:
    async with client.connection() as connection:
        with contextlib.suppress(OSError):
            await connection.send(client.rng.choice(NO_HTTP))
            connection.end_writing()
        try:
            response = await connection.response()
        except (EOFError, OSError):
            client.note("connection closed")
            return
        client.setting.tally.statuses[response.status] += 1
        if 400 <= response.status < 500:
            client.note(f"status {response.status}")
        else:
            client.fail(f"status {response.status} for what is no HTTP")


async def send_huge_body(client: Client) -> None:
    """Send more than the server takes. It may close the connection before all is sent."""
    async with client.connection() as connection:
        head = client.http("POST", "/v1/chat/completions", b"", {"content-length": str(_HUGE)})
        try:
            await connection.send(head + b'{"messages": "' + b"a" * (_HUGE - 14))
            response = await connection.response()
        except (EOFError, OSError):
            client.note("connection closed")
            return
        client.setting.tally.statuses[response.status] += 1
        if response.status == 413:
            client.note("status 413")
        else:
            client.fail(f"status {response.status} for a huge body")


async def flood(client: Client) -> None:
    """Send twice as many requests at once as the server takes."""

    async def one() -> None:
        request = client.pick()
        stream = request.asked.may_stream and client.rng.random() < 0.5
        async with client.connection() as connection:
            await connection.send(client.encoded(request, stream=stream))
            await client.finish(request, await connection.response())

    await asyncio.gather(*[one() for _ in range(2 * client.setting.num_places)])


async def reset_cache(client: Client) -> None:
    await _look_at(client, "POST", "/reset_prefix_cache", None)


async def look(client: Client) -> None:
    """Ask what operators and routers ask."""
    paths = ("/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/openapi.json", "/debug/engine")
    if client.rng.random() < 0.3:
        await _look_at(client, "POST", "/tokenize", encoded({"prompt": "a lamp " * client.rng.randint(1, 2000)}))
    else:
        await _look_at(client, "GET", client.rng.choice(paths), None)


async def _look_at(client: Client, method: str, path: str, body: bytes | None) -> None:
    async with client.connection() as connection:
        await connection.send(client.http(method, path, body))
        response = await connection.response()
        client.setting.tally.statuses[response.status] += 1
        found = await response.body()
        if response.status == 200:
            client.note("status 200")
        else:
            client.fail(f"{path}: status {response.status}: {found[:300]!r}")


MANNERS = (
    Manner("whole", 18, read_whole),
    Manner("stream", 18, read_stream),
    Manner("slow reader", 4, read_slowly),
    Manner("request in pieces", 3, send_in_pieces),
    Manner("kept connection", 3, keep_connection),
    Manner("pipelined", 2, pipeline),
    Manner("leave at once", 5, leave_at_once),
    Manner("leave soon", 8, leave_soon),
    Manner("leave in a prompt", 4, leave_in_prompt),
    Manner("leave in a stream", 8, leave_in_stream),
    Manner("leave in a call", 4, leave_in_call),
    Manner("half of a connection", 2, half_close),
    Manner("half of a request", 2, stop_in_body),
    Manner("silent connection", 1, say_nothing),
    Manner("abort by name", 5, abort_by_name),
    Manner("continued response", 5, continue_stored),
    Manner("response in the background", 5, poll_background),
    Manner("cancelled response", 4, cancel_background),
    Manner("wrong request", 8, ask_wrongly),
    Manner("no HTTP", 2, speak_no_http),
    Manner("huge body", 1, send_huge_body),
    Manner("flood", 1, flood),
    Manner("cache reset", 1, reset_cache),
    Manner("look", 3, look),
)

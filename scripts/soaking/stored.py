"""What clients of a soak do with responses that the server remembers, or that run without a client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from soaking.answers import RESPONSES
from soaking.asked import Request
from soaking.choices import BrokenAnswerError
from soaking.client import Client
from soaking.comparison import EQUAL
from soaking.response_events import ResponseReader

_RUNNING = ("queued", "in_progress")


async def continue_stored(client: Client) -> None:
    """Continue a response by its id. One that was a near tie is not continued: what follows it is not known."""
    request = client.pick("continued response")
    assert request.asked.then is not None
    first = await _read(client, request, request.asked.body)
    if first is None or client.judge(request, first, part="first") != EQUAL:
        return
    body = request.asked.then | {"previous_response_id": first.response_id}
    then = await _read(client, request, body)
    if then is not None:
        client.judge(request, then, part="then")
    if client.rng.random() < 0.3:
        place = f"{RESPONSES}/{first.response_id}"
        deleted = await _ask(client, "DELETE", place)
        is_gone = await _ask(client, "GET", place, status=404)
        if not (deleted["deleted"] and is_gone["error"]["code"] == "response_not_found"):
            client.fail(f"a response is not deleted: {deleted}, {is_gone}", request=request.number)


async def _read(client: Client, request: Request, body: dict[str, Any]) -> ResponseReader | None:
    async with client.connection() as connection:
        await connection.send(client.encoded(request, stream=client.rng.random() < 0.5, body=body))
        reader = await client.read(request, await connection.response())
    assert reader is None or isinstance(reader, ResponseReader)
    return reader


async def poll_background(client: Client) -> None:
    """Ask for a response without waiting for it, and look at it until it has ended. What was seen of it stays."""
    request, response = await _begin(client)
    if response is None:
        return
    place = f"{RESPONSES}/{response['id']}"
    while response["status"] in _RUNNING:
        await asyncio.sleep(client.rng.uniform(0.02, 0.3))
        before, response = _written(response), await _ask(client, "GET", place)
        if not _written(response).startswith(before):
            raise BrokenAnswerError(f"{before!r} of a response has become {_written(response)!r}")
    _judge(client, request, response)


async def cancel_background(client: Client) -> None:
    """Cancel a response at a random time: it waits, runs, or has ended."""
    request, response = await _begin(client)
    if response is None:
        return
    place = f"{RESPONSES}/{response['id']}"
    await asyncio.sleep(client.rng.expovariate(1 / 0.2))
    ended = await _ask(client, "POST", f"{place}/cancel")
    later = await _ask(client, "GET", place)
    if later != ended:
        client.fail(f"a response has changed after its end: {ended}, {later}", request=request.number)
    elif ended["status"] == "cancelled":
        client.note("cancelled")
    else:
        _judge(client, request, ended)


async def _begin(client: Client) -> tuple[Request, dict[str, Any] | None]:
    """Ask for a response in the background; None: the queue was full."""
    request = client.pick(fits=lambda asked: asked.path == RESPONSES)
    body = {name: value for name, value in request.asked.body.items() if name != "store"} | {"background": True}
    async with client.connection() as connection:
        await connection.send(client.encoded(request, body=body))
        response = await connection.response()
        if await client.is_refused(response):
            return request, None
        found = await response.json()
    if found["status"] not in _RUNNING:
        raise BrokenAnswerError(f"a response in the background begins as {found['status']}")
    return request, found


def _written(response: dict[str, Any]) -> str:
    """Texts and arguments of a response as far as they are there."""
    parts = (item.get("content") or [{"text": item.get("arguments", "")}] for item in response["output"])
    return "".join(part["text"] for content in parts for part in content)


def _judge(client: Client, request: Request, response: dict[str, Any]) -> None:
    reader = ResponseReader()
    reader.read_whole(response)
    client.judge(request, reader)


async def _ask(client: Client, method: str, path: str, *, status: int = 200) -> dict[str, Any]:
    """The body of an exchange.

    Raises:
        BrokenAnswerError: it has another status.
    """
    async with client.connection() as connection:
        await connection.send(client.http(method, path, None))
        response = await connection.response()
        client.setting.tally.statuses[response.status] += 1
        body = await response.body()
    if response.status != status:
        raise BrokenAnswerError(f"{method} {path}: status {response.status} instead of {status}: {body[:300]!r}")
    return json.loads(body)

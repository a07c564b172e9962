"""A client of a soak whose server is a function."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

from jaxinfer.bench.http import Address, Response
from soaking.answers import RESPONSES
from soaking.client import Client, Connection, Setting
from soaking.requests import KINDS, distinct_requests
from soaking.tally import Tally

# Method, path and body of a request -> status and body of its response.
type Serve = Callable[[str, str, Any], tuple[int, Any]]


class ScriptedConnection(Connection):
    """A connection to a function."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.reader = asyncio.StreamReader()

    async def send(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        status, found = self._serve(method, path, json.loads(body) if body else None)
        encoded = json.dumps(found).encode()
        headers = f"content-type: application/json\r\nretry-after: 1\r\ncontent-length: {len(encoded)}"
        self.reader.feed_data(f"HTTP/1.1 {status} -\r\n{headers}\r\n\r\n".encode() + encoded)

    async def response(self) -> Response:
        return await Response.read(self.reader)


class ScriptedClient(Client):
    """A client of all kinds of requests, one of each."""

    def __init__(self, serve: Serve, expected: list[Any], seed: int = 0) -> None:
        requests = distinct_requests(len(KINDS), 0)
        super().__init__(Setting(Address("localhost", 1), "key", requests, expected, 8, Tally()), random.Random(seed))
        self.manner, self._serve = "test", serve

    @contextlib.asynccontextmanager
    async def connection(self, *, is_slow: bool = False):
        yield ScriptedConnection(self._serve)

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: count for (_, outcome), count in self.setting.tally.outcomes.items()}


class Responses:
    """A server of responses, whose answers are what it was asked, all of the conversation.

    Attributes:
        knows_history: whether a continuation sees what came before it.
        num_polls: how often a response in the background is seen as queued before it ends.
        changes: whether a response that was cancelled is completed afterwards.
        is_full: whether nothing is taken.
        seen: the text of a response before it has ended; None: all of it.
    """

    def __init__(self) -> None:
        self.knows_history, self.changes, self.is_full, self.num_polls = True, False, False, 0
        self.seen: str | None = None
        self.stored: dict[str, dict[str, Any]] = {}
        self.bodies: list[Any] = []

    def serve(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == RESPONSES:
            return self._create(body)
        name = path.split("/")[3]
        if name not in self.stored:
            return 404, {"error": {"code": "response_not_found"}}
        if method == "DELETE":
            del self.stored[name]
            return 200, {"deleted": True}
        found = self.stored[name]
        if path.endswith("/cancel"):
            if not self.changes:
                found["status"] = "cancelled"
            return 200, found | {"status": "cancelled"}
        self.num_polls -= 1
        if self.num_polls < 0 and found["status"] == "queued":
            found["status"] = "completed"
        if found["status"] == "queued" and self.seen is not None:
            return 200, found | {"output": [message(self.seen)]}
        return 200, found

    def _create(self, body: Any) -> tuple[int, Any]:
        self.bodies.append(body)
        if self.is_full:
            return 503, {"error": {"code": "queue_full", "message": "the queue is full: 3 requests wait"}}
        before = self.stored.get(body.get("previous_response_id", ""), {}).get("text", "")
        text = (before if self.knows_history else "") + asked(body)
        found = {
            "id": f"resp_{len(self.stored)}", "status": "queued" if body.get("background") else "completed",
            "output": [message(text)], "text": text, "error": None,
        }  # fmt: skip
        self.stored[found["id"]] = found
        return 200, dict(found)


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": text, "logprobs": []}]}


def asked(body: Any) -> str:
    return "".join(message["content"] for message in body["input"])


def expected_text(text: str, margin: float = 1.0) -> dict[str, Any]:
    """An answer without tokens, as it is expected."""
    choice = {"text": text, "tokens": None, "finish_reasons": ["completed"], "scores": [], "calls": []}
    return {"0": choice | {"margins": [margin], "ends": [len(text)]}}


def expected_of_all(margin: float = 1.0) -> list[Any]:
    """What `Responses` answers to each of the client's requests; None for those of other endpoints."""
    found: list[Any] = []
    for request in distinct_requests(len(KINDS), 0):
        body, then = request.asked.body, request.asked.then
        if request.asked.path != RESPONSES:
            found.append(None)
        elif then is None:
            found.append(expected_text(asked(body)))
        else:
            whole = asked(body) + asked(then)
            found.append({"first": expected_text(asked(body), margin), "then": expected_text(whole)})
    return found

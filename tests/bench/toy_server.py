"""A server of OpenAI's API whose answers are scripted, on a free port of this machine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

type Script = Callable[[dict[str, Any]], Iterable[bytes]]

MODELS = {"object": "list", "data": [{"id": "toy", "object": "model"}]}


class ToyServer(ThreadingHTTPServer):
    """A server that answers as its script says, and remembers what it was asked.

    Attributes:
        asked: path, headers and body of each request, in the order of arrival.
    """

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.asked = script, list[tuple[str, dict[str, str], Any]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ToyServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, _lower(self.headers), None))
        self.wfile.write(whole(MODELS))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.asked.append((self.path, _lower(self.headers), body))
        for piece in server.script(body):
            self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def whole(value: Any, status: int = 200) -> bytes:
    """A response whose body is JSON."""
    text = json.dumps(value).encode()
    return (
        f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text
    )


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return found if cached is None else found | {"prompt_tokens_details": {"cached_tokens": cached}}


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: Any) -> bytes:
    """An event, as a chunk of a body."""
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(text), text)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


END = chunk("[DONE]") + b"0\r\n\r\n"


@contextlib.contextmanager
def toy_server(script: Script) -> Iterator[ToyServer]:
    """A server until the end of the block."""
    with ToyServer(script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""Servers in processes of their own, on free ports, and plain HTTP to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_LISTENING = re.compile(r"listening on (http://\S+)")
START_SECONDS = 120.0
# The embedded model as tests serve it: small enough to start in seconds.
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--kv-cache-tokens", "8192", "--warm-up", "off")


@dataclass
class Server:
    """A running server.

    Attributes:
        patience: seconds that `until` waits by default.
    """

    process: subprocess.Popen[str]
    url: str
    key: str | None = None
    lines: list[str] = field(default_factory=list)
    patience: float = 10.0

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one exchange."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {"authorization": f"Bearer {self.key}"} if self.key else {}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            given["content-type"] = "application/json"
        with contextlib.closing(connection):
            connection.request(method, path, body, given | (headers or {}))
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def json(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        return json.loads(self.request(method, path, body, headers)[2])

    def send(self, path: str, body: Any) -> socket.socket:
        """Send a request on a socket of its own; its response was not read yet."""
        found = socket.create_connection(("127.0.0.1", self.port))
        text = json.dumps(body).encode()
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{key}"
        found.sendall(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        return found

    def events(self, path: str, body: Any) -> list[str]:
        """Data of the events of a stream."""
        status, headers, text = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), (status, text)
        blocks = text.decode().split("\n\n")
        assert blocks.pop() == ""
        return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]

    def gauges(self) -> dict[str, float]:
        text = self.request("GET", "/metrics")[2].decode()
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#") and "bucket" not in line]
        return {name: float(value) for name, value in rows}

    def is_idle(self) -> bool:
        """Whether no request is left, and no page is held by one."""
        gauges = self.gauges()
        names = ("server_requests_running", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(gauges[f"jaxinfer:{name}"] == 0 for name in names)

    def until(self, is_true: Any, seconds: float | None = None) -> None:
        end = time.monotonic() + (self.patience if seconds is None else seconds)
        while not is_true():
            assert time.monotonic() < end, self.lines[-20:]
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def serving(*options: str, key: str | None = None, command: Sequence[str] = (), ready: bool = True) -> Iterator[Server]:
    """A server until the end of the block.

    Args:
        command: another one than `jaxinfer serve`.
        ready: wait until it takes requests.
    """
    arguments = list(command) or [sys.executable, "-m", "jaxinfer", "serve"]
    arguments += ["--port", "0", *options, *(["--api-key", key] if key else [])]
    # Compiled as tests are, in three quarters of the time.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    server = Server(process, "", key)
    listening = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line.rstrip())
            found = _LISTENING.search(line)
            if found:
                server.url = found[1]
                listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(START_SECONDS) and server.url, server.lines
        if ready:
            server.until(lambda: server.request("GET", "/health")[0] == 200, START_SECONDS)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()

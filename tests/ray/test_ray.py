"""Replicas under Ray, and files under Ray Data, in an environment of its own (`make test-ray`)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.chats import Served, answered, is_ready, load
from tests.server.processes import SMALL, free_port, serving

START_SECONDS = 300.0
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
LIMITS = SMALL[: SMALL.index("--warm-up")]


@contextlib.contextmanager
def replicas(routing: str, *options: str, log: Path | None = None) -> Iterator[int]:
    """Two replicas under Ray until the end of the block, whose stderr goes to a file if one is given; yields the
    port."""
    port = free_port()
    command = [
        sys.executable, "-m", "jaxinfer", "serve", "--ray", "--replicas", "2", "--ray-routing", routing,
        "--port", str(port), *SMALL, *options,
    ]  # fmt: skip
    with contextlib.nullcontext() if log is None else log.open("wb") as stderr:
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=stderr)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def alone() -> Served:
    """What one server answers."""
    with serving(*SMALL) as server:
        return load(server.port)


def replica_processes() -> list[int]:
    """Return the process ids of the replicas that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::ServeReplica:jaxinfer:Replica"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("routing", ["power_of_two", "session", "prefix"])
def test_replicas_answer_as_one_server_does(alone, routing):
    with replicas(routing) as port:
        found = load(port)
        assert len(replica_processes()) == 2
        assert found.texts == alone.texts and found.prompt_tokens == alone.prompt_tokens
        if routing == "prefix":
            assert found.cached_tokens >= 0.9 * alone.cached_tokens
        check_errors_and_streams(port)


def check_errors_and_streams(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", "{", {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 400 and "error" in json.loads(response.read())
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.getheader("content-type", "").startswith("text/event-stream")
        events = [line for line in response.read().decode().split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]" and len(events) > 3


def test_a_client_that_leaves_ends_its_request():
    with replicas("prefix") as port:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.getresponse().read(10)
        connection.close()
        deadline = time.monotonic() + 60
        while load_of(port) or load_of(port) or load_of(port) or load_of(port):  # of either replica
            assert time.monotonic() < deadline, "it runs on"
            time.sleep(0.1)


def test_requests_are_logged_where_that_is_asked_for(tmp_path):
    log = tmp_path / "log.txt"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "A secret."}]}
    with replicas("power_of_two", "--log-requests", log=log) as port:
        answered(port, body)
    text = log.read_text()
    assert "POST /v1/chat/completions: 200 in" in text  # which no line of Ray's is
    assert "secret" not in text


def load_of(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/load")
        return json.loads(connection.getresponse().read())["server_load"]


def test_a_killed_replica_is_replaced_and_nothing_is_lost_to_clients_that_ask_again(alone):
    with replicas("power_of_two") as port:
        load(port)  # programs compile
        before = replica_processes()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            running = thread.submit(load, port, 100)
            time.sleep(1)
            assert not running.done()
            os.kill(before[0], signal.SIGKILL)
            assert running.result().texts == alone.texts
        deadline = time.monotonic() + START_SECONDS
        while len(now := replica_processes()) < 2 or before[0] in now:
            assert time.monotonic() < deadline, "no other one came"
            time.sleep(0.2)
        assert answered(port, {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}]}, tries=100)


def lines(path: Path, count: int) -> None:
    found: list[dict[str, Any]] = [
        {
            "custom_id": f"id {number}", "method": "POST", "url": "/v1/completions",
            "body": {"prompt": f"Once {number}", "max_tokens": 12, "temperature": 1.0},
        }
        for number in range(count)
    ]  # fmt: skip
    found[5]["body"] = {"prompt": []}
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


def test_a_file_is_answered_as_without_ray_also_after_a_kill(tmp_path):
    source, whole, target = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    lines(source, 40)
    start = [sys.executable, "-m", "jaxinfer", "batch", str(source)]
    subprocess.run([*start, str(whole), *LIMITS], env=ENVIRONMENT, check=True)
    command = [*start, str(target), *LIMITS, "--concurrency", "4", "--ray", "--replicas", "2"]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    deadline = time.monotonic() + START_SECONDS
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert target.read_bytes().count(b"\n") < 40
    subprocess.run(command, env=ENVIRONMENT, check=True)
    assert target.read_bytes() == whole.read_bytes()

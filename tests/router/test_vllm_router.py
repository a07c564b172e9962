"""Two servers and vLLM's router, in an environment of its own (`make test-router`)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.chats import Served, answered, is_ready, load
from tests.server.processes import SMALL, Server, free_port, serving

COMMAND = Path(__file__).resolve().parents[2] / ".venv-router" / "bin" / "vllm-router"
START_SECONDS = 60.0


class Replica(NamedTuple):
    """A server, and where it publishes what its cache holds."""

    server: Server
    events: str
    replays: str


@contextlib.contextmanager
def replica(*options: str) -> Iterator[Replica]:
    events, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with serving(
        *SMALL, "--kv-events-endpoint", events, "--kv-events-replay-endpoint", replays, *options
    ) as server:  # fmt: skip
        yield Replica(server, events, replays)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Replica]]:
    with replica() as first, replica() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def alone(two) -> Served:
    """What one server answers."""
    load(two[0].server.port)
    empty(two)
    return load(two[0].server.port)


def empty(replicas: list[Replica]) -> None:
    for each in replicas:
        assert each.server.request("POST", "/reset_prefix_cache")[0] == 200


@contextlib.contextmanager
def router(replicas: list[Replica], policy: str, *options: str) -> Iterator[int]:
    """vLLM's router until the end of the block; yields its port."""
    port = free_port()
    command = [str(COMMAND), "--host", "127.0.0.1", "--port", str(port), "--policy", policy, *options]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(each.server.url for each in replicas)]
    if policy == "kv_aware":
        command += ["--kv-event-model", "tiny", "--kv-event-block-size", "16"]
        for each in replicas:
            command += ["--kv-event-source", f"{each.server.url}={each.events}"]
            command += ["--kv-event-replay-source", f"{each.server.url}={each.replays}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_ready(port), START_SECONDS)
        yield port
    finally:
        process.kill()
        process.wait()


def until(is_true: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def prompt_tokens(server: Server) -> float:
    return server.gauges()["jaxinfer:prompt_tokens_total"]


@pytest.mark.parametrize("policy", ["cache_aware", "kv_aware"])
def test_a_router_by_prefixes_finds_what_one_server_finds(two, alone, policy):
    empty(two)
    with router(two, policy) as port:
        found = load(port)
    assert found.texts == alone.texts and found.prompt_tokens == alone.prompt_tokens
    assert found.cached_tokens >= 0.9 * alone.cached_tokens


def test_requests_in_turn_are_answered_by_both_servers_as_by_one(two, alone):
    empty(two)
    before = [prompt_tokens(each.server) for each in two]
    with router(two, "round_robin") as port:
        found = load(port)
    assert found.texts == alone.texts
    assert all(prompt_tokens(each.server) > first for each, first in zip(two, before, strict=True))


def test_nothing_is_lost_when_a_server_is_killed_and_it_is_used_again_when_it_is_back(two, alone):
    other = free_port()
    options = (
        "--health-check-interval-secs",
        "1",
        "--cb-timeout-duration-secs",
        "2",
        "--health-success-threshold",
        "1",
    )
    with contextlib.ExitStack() as stack:
        dying = stack.enter_context(replica("--port", str(other)))
        load(dying.server.port)  # programs compile
        port = stack.enter_context(router([two[0], dying], "round_robin", *options))
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            running = thread.submit(load, port)
            before = prompt_tokens(dying.server)
            until(lambda: prompt_tokens(dying.server) > before, 60)
            os.kill(dying.server.process.pid, signal.SIGKILL)
            assert running.result().texts == alone.texts
        again = stack.enter_context(replica("--port", str(other)))

        def is_used() -> bool:
            answered(port, {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1})
            return prompt_tokens(again.server) > 0

        until(is_used, 120)

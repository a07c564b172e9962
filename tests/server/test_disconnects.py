"""Clients that leave at every moment of a request: while it waits, in its prompt, in its answer, within a tool call."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from soaking.model import model_with_tools
from soaking.server import held
from tests.server.processes import SMALL, Server, serving

CHAT = "/v1/chat/completions"
WORDS = ("lamp", "boat", "drum", "garden", "bicycle", "kettle", "harbour", "letter", "clock", "bridge", "bread")
# Of one round a launch, so that it takes seconds.
SLOW = {"logprobs": True, "top_logprobs": 20}
LONG = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 600}
NAMES = {"type": "string", "minLength": 200, "maxLength": 300}
TOOL = {
    "type": "function",
    "function": {
        "name": "tell",
        "parameters": {
            "type": "object", "properties": {"text": NAMES}, "required": ["text"], "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def leaving(tmp_path_factory) -> Iterator[Server]:
    """A server with tools, whose prompts take many steps. All moments were once: a step that compiles takes seconds."""
    model = model_with_tools(tmp_path_factory.mktemp("with tools"))
    with serving(str(model), *SMALL, "--max-num-batched-tokens", "32", "--debug-endpoints", key="secret") as found:
        found.patience = 120.0
        with full_seats(found):
            leave_in_queue(found, random.Random(1))
        found.until(found.is_idle)
        for moment in MOMENTS:
            moment(found, random.Random(2))
            found.until(found.is_idle)
        found.patience = 5.0
        yield found


def question(rng: random.Random, length: int = 6) -> dict[str, Any]:
    """A prompt that was not asked before, so that nothing of it is cached."""
    return {"messages": [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(length))}]}


def metric(server: Server, name: str) -> float:
    return server.gauges()[f"jaxinfer:{name}"]


def leave_in_queue(server: Server, rng: random.Random) -> None:
    """Leave while all seats are taken."""
    connection = server.send(CHAT, question(rng) | LONG | {"stream": rng.random() < 0.5})
    server.until(lambda: metric(server, "num_requests_waiting") == 1)
    close(connection, rng)
    server.until(lambda: metric(server, "num_requests_waiting") == 0)


def leave_in_prompt(server: Server, rng: random.Random) -> None:
    """Leave after a random share of the prompt's chunks."""
    before = server.gauges()
    connection = server.send(CHAT, question(rng, 400) | LONG | {"stream": rng.random() < 0.5})
    chunks = 32 * rng.randint(1, 8)
    server.until(lambda: metric(server, "scheduled_tokens_total") - before["jaxinfer:scheduled_tokens_total"] >= chunks)
    close(connection, rng)
    server.until(server.is_idle)
    assert metric(server, "prompt_tokens_total") == before["jaxinfer:prompt_tokens_total"], "its prompt was complete"


def leave_in_stream(server: Server, rng: random.Random) -> None:
    """Leave after a random number of events."""
    limit = rng.randint(1, 30)
    read_until(server, rng, question(rng) | LONG | SLOW, lambda event, count: count == limit)


def leave_whole_answer(server: Server, rng: random.Random) -> None:
    """Leave after a random number of tokens of an answer that is not streamed."""
    before = metric(server, "generation_tokens_total")
    connection = server.send(CHAT, question(rng) | LONG | SLOW)
    count = rng.randint(1, 30)
    server.until(lambda: metric(server, "generation_tokens_total") - before >= count)
    close(connection, rng)


def leave_in_call(server: Server, rng: random.Random) -> None:
    """Leave within the arguments of a tool call."""
    body = question(rng) | LONG | SLOW | {"ignore_eos": False, "tools": [TOOL], "tool_choice": "required"}
    limit = rng.randint(1, 20)

    def is_in_call(event: Any, count: int) -> bool:
        calls = event["choices"][0]["delta"].get("tool_calls") or [{}]
        return count >= limit and bool((calls[0].get("function") or {}).get("arguments"))

    read_until(server, rng, body, is_in_call)


def leave_in_samples(server: Server, rng: random.Random) -> None:
    """Leave several samples of one prompt."""
    body, limit = question(rng) | LONG | SLOW | {"n": rng.randint(2, 8)}, rng.randint(1, 60)
    read_until(server, rng, body, lambda event, count: count == limit)


def read_until(server: Server, rng: random.Random, body: dict[str, Any], is_time: Callable[[Any, int], bool]) -> None:
    """Read a stream until it is time to leave. It must not end before."""
    connection = server.send(CHAT, body | {"stream": True})
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200, response.read()
    count = 0
    while True:
        line = response.readline().decode()
        if line.startswith("data: "):
            assert "[DONE]" not in line, "the stream has ended before its client left"
            count += 1
            if is_time(json.loads(line.removeprefix("data: ")), count):
                break
    response.close()
    close(connection, rng)


def close(connection: socket.socket, rng: random.Random) -> None:
    """Close a connection, by an end or by a reset."""
    if rng.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@contextmanager
def full_seats(server: Server) -> Iterator[None]:
    """All seats are taken within the block."""
    with server.send(CHAT, question(random.Random(0)) | LONG | SLOW | {"n": 8, "max_tokens": 900}):
        server.until(lambda: metric(server, "num_requests_running") == 8)
        yield
        assert metric(server, "num_requests_running") == 8, "seats were free before the end of the block"


MOMENTS = (leave_in_prompt, leave_in_stream, leave_whole_answer, leave_in_call, leave_in_samples)
QUEUED_AT_ONCE = 5


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_clients_that_leave_at_any_moment_leave_nothing(leaving, count):
    rng = random.Random(count)
    before = metric(leaving, "server_clients_left_total")
    num_queued = 0
    while num_queued < count // 6:
        with full_seats(leaving):
            for _ in range(QUEUED_AT_ONCE):
                leave_in_queue(leaving, rng)
        num_queued += QUEUED_AT_ONCE
        before += 1  # the one that has taken the seats leaves too
        check_that_nothing_is_held(leaving)
    for number in range(count - num_queued):
        generated = metric(leaving, "generation_tokens_total")
        MOMENTS[number % len(MOMENTS)](leaving, rng)
        check_that_nothing_is_held(leaving)
        assert metric(leaving, "generation_tokens_total") - generated < 400, "it has run to its end"
    assert metric(leaving, "server_clients_left_total") == before + count
    assert metric(leaving, "num_step_failures_total") == 0
    assert not [line for line in leaving.lines if " ERROR " in line]


def check_that_nothing_is_held(server: Server) -> None:
    server.until(server.is_idle)
    assert held(server.json("GET", "/debug/engine")) == {}


def test_what_the_engine_holds_is_served_on_demand_only(leaving, server):
    found = leaving.json("GET", "/debug/engine")
    assert found["num_pages"] == 8192 // 16 == found["num_free_pages"] + found["num_cached_pages"]
    assert found["num_free_seats"] == found["num_seats"] == 8
    assert leaving.request("GET", "/debug/engine", headers={"authorization": ""})[0] == 401
    assert server.request("GET", "/debug/engine")[0] == 404


def test_what_a_running_request_holds_is_counted(leaving):
    with leaving.send(CHAT, question(random.Random(1)) | LONG | SLOW | {"n": 3}):
        leaving.until(lambda: metric(leaving, "num_requests_running") == 3, seconds=10)
        left = held(leaving.json("GET", "/debug/engine"))
    assert left.pop("num_held_pages") >= 3
    assert left == {"num_requests": 3, "num_readers": 1, "num_http_requests": 1, "taken seats": 3}
    leaving.until(leaving.is_idle)

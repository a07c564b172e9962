"""Life of requests and of the server: clients that leave, full queues, loading, signals."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import math
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.async_llm import EngineDeadError
from jaxinfer.cli.main import main
from jaxinfer.server import run
from jaxinfer.server.app import build_app
from jaxinfer.server.run import EXIT_DEAD, ServerProcess
from jaxinfer.server.service import Service
from jaxinfer.server.settings import ServerSettings
from tests.server.processes import SMALL, serving

CHAT = "/v1/chat/completions"
LONG = {
    "messages": [{"role": "user", "content": "How old is the lighthouse?"}], "temperature": 1.0, "ignore_eos": True,
    "max_tokens": 900,
}  # fmt: skip

# Of one round a launch, so that it takes seconds.
SLOW = {"logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_client_that_leaves_is_aborted(server, path, stream):
    connection = server.send(path, LONG | {"stream": stream})
    server.until(lambda: server.gauges()["jaxinfer:num_requests_running"] == 1)
    before = server.gauges()["jaxinfer:generation_tokens_total"]
    connection.close()
    server.until(server.is_idle, seconds=5)
    assert server.gauges()["jaxinfer:generation_tokens_total"] - before < 800


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_is_aborted(server, stream):
    running = [server.send(CHAT, LONG | {"n": 8}) for _ in range(4)]
    server.until(lambda: server.gauges()["jaxinfer:server_requests_running"] == 4)
    waiting = server.send(CHAT, LONG | {"stream": stream})
    server.until(lambda: server.gauges()["jaxinfer:server_requests_running"] == 5)
    before = server.gauges()["jaxinfer:server_clients_left_total"]
    waiting.close()
    server.until(lambda: server.gauges()["jaxinfer:server_clients_left_total"] == before + 1, seconds=5)
    for connection in running:
        connection.close()
    server.until(server.is_idle)
    # The first of those that ran may have ended by itself meanwhile.
    assert before + 2 <= server.gauges()["jaxinfer:server_clients_left_total"] <= before + 5


def test_a_slow_reader_loses_nothing_and_holds_up_nobody(server):
    connection = server.send(
        CHAT, LONG | {"stream": True, "seed": 3, "logprobs": True, "top_logprobs": 8, "max_tokens": 600}
    )
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    begin = time.monotonic()
    whole = server.json("POST", CHAT, LONG | {"seed": 3, "max_tokens": 600})
    assert time.monotonic() - begin < 60
    server.until(lambda: server.gauges()["jaxinfer:num_requests_running"] == 0)
    response = http.client.HTTPResponse(connection)
    response.begin()
    events = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]


def test_a_full_queue_is_told_before_the_answer_begins():
    with serving(*SMALL, "--max-num-seqs", "2", "--max-waiting-requests", "1", key="secret") as server:
        taken = []
        for number in range(3):  # two run, one waits
            taken.append(server.send(CHAT, LONG | {"stream": True} | SLOW))
            server.until(lambda number=number: server.gauges()["jaxinfer:server_requests_running"] == number + 1)
        status, headers, body = server.request("POST", CHAT, LONG | {"stream": True})
        error = json.loads(body)["error"]
        assert status == 503 and headers["retry-after"] == "1" and error["code"] == "queue_full"
        assert server.gauges()["jaxinfer:server_requests_refused_total"] == 1
        taken[0].close()
        server.until(lambda: server.gauges()["jaxinfer:server_requests_running"] == 2)
        assert server.request("POST", CHAT, LONG | {"max_tokens": 2})[0] == 200
        for connection in taken:
            connection.close()


def test_loading_answers_503_and_a_signal_lets_streams_end():
    with serving(*SMALL, key="secret", ready=False) as server:
        status, headers, body = server.request("POST", CHAT, LONG)
        assert status == 503 and json.loads(body)["error"]["code"] == "loading" and headers["retry-after"]
        server.until(lambda: server.request("GET", "/health")[0] == 200, seconds=120)
        events: list[str] = []
        stream = threading.Thread(target=lambda: events.extend(server.events(CHAT, LONG)))
        stream.start()
        server.until(lambda: server.gauges()["jaxinfer:num_requests_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.request("GET", "/health")[0] == 503)
        for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", f"{CHAT}/render"):
            status, headers, body = server.request("POST", path, LONG)
            assert status == 503 and "shutting down" in json.loads(body)["error"]["message"]
            assert int(headers["retry-after"]) > 0
        assert server.gauges()["jaxinfer:server_ready"] == 0
        stream.join()
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length" and events[-1] == "[DONE]"
        assert server.process.wait(timeout=30) == 0


def test_a_second_signal_ends_streams_at_once():
    with serving(*SMALL, key="secret") as server:
        events: list[str] = []
        stream = threading.Thread(target=lambda: events.extend(server.events(CHAT, LONG | {"n": 4})))
        stream.start()
        server.until(lambda: server.gauges()["jaxinfer:num_requests_running"] == 4)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert server.process.wait(timeout=30) == 0
        stream.join()
        assert "error" in json.loads(events[-2]) and events[-1] == "[DONE]"


def test_a_second_signal_ends_a_process_whose_model_is_loading():
    command = [sys.executable, "-m", "tests.server.faulty", "loading"]
    with serving(*SMALL, command=command, ready=False) as server:
        assert server.gauges()["jaxinfer:server_ready"] == 0
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: any("no more requests are taken" in line for line in server.lines))
        assert server.process.poll() is None, "it does not wait for the model"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0


def test_an_error_from_which_the_engine_recovers_ends_no_stream():
    command = [sys.executable, "-m", "tests.server.faulty", "once"]
    with serving(*SMALL, key="secret", command=command) as server:
        body = LONG | {"temperature": 0, "max_tokens": 60, "min_tokens": 60}
        chunks = [json.loads(event)["choices"][0] for event in server.events(CHAT, body)[:-1]]
        again = server.json("POST", CHAT, body)["choices"][0]
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == again["message"]["content"]
        assert chunks[-1]["finish_reason"] == "length"
        gauges = server.gauges()
        assert gauges["jaxinfer:num_step_failures_total"] == gauges["jaxinfer:num_recoveries_total"] == 1
        assert server.request("GET", "/health")[0] == 200


def test_an_engine_that_cannot_recover_ends_streams_and_the_process():
    command = [sys.executable, "-m", "tests.server.faulty", "always"]
    with serving(*SMALL, key="secret", command=command) as server:
        events = server.events(CHAT, LONG)
        error = json.loads(events[-2])["error"]
        assert "cannot recover" in error["message"] and events[-1] == "[DONE]"
        assert server.process.wait(timeout=30) == EXIT_DEAD


class DeadEngine:
    """An engine that cannot recover."""

    config = SimpleNamespace(max_num_seqs=8)

    def check_alive(self) -> None:
        raise EngineDeadError("injected")

    def get_metrics(self) -> None:
        raise EngineDeadError("injected")


def test_metrics_of_a_dead_engine_say_that_it_is_dead():
    service, sent = Service(ServerSettings(), "tiny"), []
    service.open(DeadEngine())  # pyright: ignore[reportArgumentType]
    app = build_app(service)

    async def send(message: Any) -> None:
        sent.append(message)

    async def get(path: str) -> None:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        await app(scope, None, send)  # pyright: ignore[reportArgumentType]

    for _ in range(2):  # the first one notices
        asyncio.run(get("/metrics"))
    asyncio.run(get("/health"))
    statuses = [message["status"] for message in sent if "status" in message]
    assert statuses == [200, 200, 503]
    assert b"jaxinfer:server_ready 0\n" in sent[1]["body"] and b"jaxinfer:server_ready 0\n" in sent[3]["body"]


def test_what_a_model_has_made_is_not_looked_through_again_by_collections_of_garbage(monkeypatch):
    monkeypatch.setattr(run, "AsyncLLM", lambda **_: DeadEngine())
    try:
        asyncio.run(ServerProcess(ServerSettings(warm_up="off"), {}, "tiny")._load())
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_a_request_ends_when_its_time_is_over():
    with serving(*SMALL, "--request-timeout", "0.5", key="secret") as server:
        server.request("POST", CHAT, LONG)  # compiles
        begin = time.monotonic()
        answer = server.json("POST", CHAT, LONG | {"n": 4})
        assert time.monotonic() - begin < 8
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] < 4 * 900
        chunks = [json.loads(event)["choices"][0] for event in server.events(CHAT, LONG)[:-1]]
        assert chunks[-1]["finish_reason"] == "length"
        server.until(server.is_idle)


def test_nothing_of_a_request_is_logged():
    word, user = "sturgeon", "user-17"
    with serving(*SMALL, "--log-requests", key="very-secret") as server:
        body = LONG | {"messages": [{"role": "user", "content": word}], "max_tokens": 3, "user": user}
        assert server.request("POST", CHAT, body)[0] == 200
        assert server.request("POST", CHAT, body | {"temperature": word})[0] == 400
        assert server.request("POST", CHAT, body | {"structured_outputs": {"regex": f"({word}"}})[0] == 400
        assert server.request("POST", CHAT, body | {"skeleton_of_thought": True})[0] == 200
        assert server.events(CHAT, body)[-1] == "[DONE]"
        assert server.request("POST", "/v1/completions", {"prompt": word, "max_tokens": 3})[0] == 200
        assert server.request("POST", "/v1/responses", {"input": word, "max_output_tokens": 3})[0] == 200
        assert server.request("GET", f"/v1/responses/a/input_items?after={word}")[0] == 404
        assert server.request("POST", CHAT, word.encode())[0] == 400
        assert server.request("POST", f"/{word}", body)[0] == 404
        text = server.request("GET", "/metrics")[2].decode()
        assert server.stop() == 0
        lines = "\n".join(server.lines)
        assert f"POST {CHAT}: 200 in" in lines
        assert not any(secret in lines.replace(f"/{word}", "") + text for secret in (word, user, "very-secret"))


@pytest.mark.parametrize(
    "name, value",
    [("port", -1), ("port", 1 << 16), ("max_waiting_requests", -1), ("max_waiting_tokens", -1), ("max_body_bytes", 0),
     ("max_stored_responses", -1), ("max_stored_bytes", -1), ("shutdown_timeout", -1.0), ("shutdown_timeout", math.nan),
     ("request_timeout", 0.0), ("request_timeout", math.inf), ("read_timeout", -1.0), ("heartbeat_seconds", 0.0),
     ("warm_up", "x"), ("tool_call_parser", "x"), ("reasoning_parser", "x"), ("api_keys", [""])],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ServerSettings(**{name: value})


@pytest.mark.parametrize("option", ["--max-waiting-requests", "--max-body-bytes", "--request-timeout"])
def test_options_out_of_bounds_are_refused_by_name_before_anything_is_loaded(option, capsys, monkeypatch):
    monkeypatch.delattr(ServerProcess, "run")  # nothing is served
    assert main(["serve", option, "-1"]) == 1
    assert option.removeprefix("--").replace("-", "_") in capsys.readouterr().err


def test_a_server_that_others_reach_needs_a_key():
    with pytest.raises(ValueError, match="--api-key"):
        ServerSettings(host="0.0.0.0")
    ServerSettings(host="0.0.0.0", api_keys=["k"])
    ServerSettings(host="::1")
    ServerSettings(host="0.0.0.0", allow_unauthenticated=True)

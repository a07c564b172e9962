"""Life of requests and of the server: clients that leave, full queues, loading, signals."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import threading
import time

import pytest

from jaxinfer.server.run import EXIT_DEAD
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
        status, _, body = server.request("POST", CHAT, LONG)
        assert status == 503 and json.loads(body)["error"]["code"] == "draining"
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
        assert server.request("POST", f"/{word}", body)[0] == 404
        text = server.request("GET", "/metrics")[2].decode()
        assert server.stop() == 0
        lines = "\n".join(server.lines)
        assert f"POST {CHAT}: 200 in" in lines
        assert not any(secret in lines.replace(f"/{word}", "") + text for secret in (word, user, "very-secret"))


def test_a_server_that_others_reach_needs_a_key():
    from jaxinfer.server.settings import ServerSettings

    with pytest.raises(ValueError, match="--api-key"):
        ServerSettings(host="0.0.0.0")
    ServerSettings(host="0.0.0.0", api_keys=["k"])
    ServerSettings(host="::1")
    ServerSettings(host="0.0.0.0", allow_unauthenticated=True)

"""Clients that send what others do not: headers of browsers and gateways, odd prompts, bodies that ask for much."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.server.processes import SMALL, Server, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ORIGIN = "https://a.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*SMALL, "--cors-origins", ORIGIN) as found:
        yield found
        assert found.is_idle()


def test_a_browser_may_send_the_headers_of_official_clients(server):
    wanted = "authorization,content-type,x-stainless-arch,x-stainless-lang,anthropic-dangerous-direct-browser-access"
    asks = {
        "Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted,
    }  # fmt: skip
    status, headers, _ = server.request("OPTIONS", CHAT, headers=asks)
    assert status == 200 and headers["access-control-allow-origin"] == ORIGIN
    assert set(wanted.split(",")) <= {name.strip() for name in headers["access-control-allow-headers"].split(",")}
    _, headers, _ = server.request("GET", "/v1/models", headers={"Origin": ORIGIN})
    assert "retry-after" in headers["access-control-expose-headers"]
    assert server.request("OPTIONS", CHAT, headers=asks | {"Origin": "https://b.example"})[0] == 400


def test_long_headers_of_gateways_are_read(server):
    status, _, body = server.request("GET", "/v1/models", headers={"cookie": "a" * 40_000, "x-token": "b" * 40_000})
    assert status == 200 and json.loads(body)["data"]


@pytest.mark.parametrize("token", [-1, 2**31, 2**32, 2**64])
def test_tokens_that_no_vocabulary_has_are_refused(server, token):
    body = {"prompt": [token], "echo": True, "max_tokens": 1}
    status, _, found = server.request("POST", COMPLETIONS, body)
    error = json.loads(found)["error"]
    assert status == 400 and error["param"] == "prompt" and str(token) in error["message"]


def test_a_search_that_finds_fewer_texts_than_asked_gives_those(server):
    body = {
        "prompt": "The", "use_beam_search": True, "n": 3, "max_tokens": 8,
        "structured_outputs": {"choice": ["yes", "no"]},
    }  # fmt: skip
    found = server.json("POST", COMPLETIONS, body)
    assert {choice["text"] for choice in found["choices"]} == {"yes", "no"}
    assert all(choice["finish_reason"] == "stop" for choice in found["choices"])


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"branches": ["a"] * 5000}, "branches"),
        ({"stop": "a" * 1025}, "stop"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"logit_bias": {str(token): 1 for token in range(321)}}, "logit_bias"),
    ],
)
def test_what_would_cost_the_engine_very_much_is_refused(server, more, param):
    status, _, found = server.request("POST", COMPLETIONS, {"prompt": "The", "max_tokens": 2, **more})
    assert status == 400 and json.loads(found)["error"]["param"] == param


def test_characters_at_which_some_clients_end_lines_are_escaped(server):
    text = "a\u2028b\u2029c\x85d"
    body = {"prompt": "The", "max_tokens": 40, "structured_outputs": {"choice": [text]}, "temperature": 0}
    events = server.events(COMPLETIONS, body)
    assert all(len(event.splitlines()) == 1 for event in events)
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def test_a_request_is_aborted_by_the_id_of_its_answer(server):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.send(CHAT, body) as connection:
        first = b""
        while b"\n\n" not in first.partition(b"\r\n\r\n")[2]:
            first += connection.recv(4096)
        name = json.loads(first.partition(b"data: ")[2].partition(b"\n\n")[0])["id"]
        assert name.startswith("chatcmpl-")
        assert server.request("POST", "/abort_requests", {"request_ids": [name]})[0] == 200
        rest = first
        while part := connection.recv(65536):
            rest += part
            if b"[DONE]" in rest or b'"error"' in rest:
                break
    assert b"the request was aborted" in rest
    server.until(server.is_idle)

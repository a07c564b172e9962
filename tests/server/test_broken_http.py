"""Requests that turn out to be none of HTTP, at any point of them: the client is told, and nothing is logged."""

from __future__ import annotations

import json
import socket

import pytest

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
KEY = b"authorization: Bearer secret\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
BODY = json.dumps(
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
).encode()
NO_CHUNK = b"ZZ\r\nno chunk"


def exchange(server, *pieces: bytes) -> bytes:
    """What comes back of pieces, each of which is sent once something has come back of those before."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        found = b""
        for number, piece in enumerate(pieces):
            connection.sendall(piece)
            if number < len(pieces) - 1:
                found += connection.recv(1 << 16)
        while part := connection.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        ([b"GARBAGE\r\n\r\n"], [b"400"]),
        ([b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"GARBAGE\r\n\r\n"], [b"200", b"400"]),
        ([CHAT + CHUNKED + NO_CHUNK], [b"400"]),
        ([CHAT + KEY + CHUNKED + NO_CHUNK], [b"400"]),
        ([CHAT + KEY + b"content-length: minus\r\n\r\n"], [b"400"]),
        ([CHAT + CHUNKED, NO_CHUNK], [b"401"]),
        ([CHAT + KEY + b"expect: 100-continue\r\n" + CHUNKED, NO_CHUNK], [b"100", b"400"]),
        ([b"GET /health HTTP/1.1\r\nhost: x\r\n" + CHUNKED, NO_CHUNK], [b"200"]),
    ],
)  # fmt: skip
def test_what_is_no_http_is_no_error_of_the_server(server, pieces, statuses):
    before = len(server.lines)
    found = exchange(server, *pieces)
    assert [line.split()[1] for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")] == statuses
    assert server.request("GET", "/health")[0] == 200
    assert not [line for line in server.lines[before:] if " ERROR " in line]


def test_a_client_whose_pipeline_breaks_is_no_longer_answered(server):
    head = CHAT + KEY + b"content-length: %d\r\n\r\n" % len(BODY)
    before = len(server.lines)
    found = exchange(server, head + BODY + b"GARBAGE\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in found
    server.until(server.is_idle)
    assert not [line for line in server.lines[before:] if " ERROR " in line]


@pytest.mark.parametrize("ahead", ["", "the next request", "too much"])
def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_ahead(server, ahead):
    body = json.dumps(json.loads(BODY) | {"stream": False, "n": 4}).encode()
    request = CHAT + KEY + b"content-length: %d\r\n\r\n" % len(body) + body
    name = "jaxinfer:server_clients_left_total"
    before = server.gauges()[name]
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    with connection:
        connection.sendall(request)
        server.until(lambda: server.gauges()["jaxinfer:server_requests_running"])
        connection.sendall({"": b"", "the next request": request, "too much": b"x" * 200_000}[ahead])
        if ahead == "too much":  # it is left itself
            server.until(lambda: server.gauges()[name] > before)
    server.until(lambda: server.gauges()[name] > before)
    server.until(server.is_idle)

"""Requests that are wrong, each with the statuses that are right for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from soaking.answers import COMPLETIONS, CONVERSATIONS, MESSAGES, RESPONSES

_MESSAGES = [{"role": "user", "content": "How do I mend a lamp?"}]


@dataclass(frozen=True)
class Bad:
    """A wrong request.

    Attributes:
        body: sent as JSON; bytes are sent as they are.
        headers: beside the usual ones, or in their place.
    """

    name: str
    statuses: tuple[int, ...]
    body: Any = b""
    path: str = CONVERSATIONS
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": _MESSAGES, "max_tokens": 4, **more}


_USE = {"type": "tool_use", "id": "t", "name": "describe", "input": {}}


def _message(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], "max_tokens": 4, **more}


BAD = (
    Bad("empty", (400,)),
    Bad("half of an object", (400,), b'{"messages": [{"role": "user"'),
    Bad("a list", (400,), b"[1, 2]"),
    Bad("not UTF-8", (400,), b'{"messages": "\xff\xfe"}'),
    Bad("not a number", (400,), b'{"messages": NaN}'),
    Bad("a key twice", (400,), b'{"n": 1, "n": 2}'),
    Bad("deep", (400,), b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    Bad("half of a surrogate pair", (400,), b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    Bad("a wrong type", (400,), _chat(temperature="hot")),
    Bad("out of range", (400,), _chat(temperature=-1)),
    Bad("too many samples", (400,), _chat(n=100_000)),
    Bad("many errors", (400,), {"messages": [{"role": 1}] * 3000}),
    Bad("no messages", (400,), {"messages": []}),
    Bad("an unknown role", (400,), {"messages": [{"role": "king", "content": "x"}]}),
    Bad("an unknown model", (404,), _chat(model="other")),
    Bad("a refused field", (400,), _chat(guided_json={"type": "object"})),
    Bad("an invalid expression", (400,), _chat(structured_outputs={"regex": "(["})),
    Bad("an invalid schema", (400,), _chat(structured_outputs={"json": {"type": 3}})),
    Bad("a call of no tool", (400,), _chat(tool_choice="required")),
    Bad("too long a prompt", (400,), _chat(messages=[{"role": "user", "content": "lamp " * 3000}])),
    Bad("too long an answer", (400,), {"prompt": "A lamp", "max_tokens": 100_000}, COMPLETIONS),
    Bad("too many prompts", (400,), {"prompt": ["a"] * 1500, "max_tokens": 1}, COMPLETIONS),
    Bad("unknown tokens", (400,), {"prompt": [1, 2, 99_999], "max_tokens": 1}, COMPLETIONS),
    Bad("another type of content", (400,), b"{}", headers=(("content-type", "text/plain"),)),
    Bad("a wrong key", (401,), _chat(), headers=(("authorization", "Bearer wrong"),)),
    Bad("no key", (401,), _chat(), headers=(("authorization", ""),)),
    Bad("an unknown path", (404,), _chat(), "/v1/nothing"),
    Bad("a wrong method", (405,), None, method="GET"),
    Bad("a message without its length", (400,), {"messages": _MESSAGES}, MESSAGES),
    Bad("a message of an image", (400,), _message([{"type": "image", "source": {}}]), MESSAGES),
    Bad("a message that ends with a call", (400,), _message([_USE], role="assistant"), MESSAGES),
    Bad("a tool that runs elsewhere", (400,), _message("x", tools=[{"type": "bash_20250124", "name": "b"}]), MESSAGES),
    Bad("a message to a wrong key", (401,), _message("x"), MESSAGES, headers=(("authorization", "Bearer wrong"),)),
    Bad("a response to nothing", (400,), {"input": []}, RESPONSES),
    Bad("an output of no call", (400,), {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        RESPONSES),
    Bad("a stream in the background", (400,), {"input": "x", "background": True, "stream": True}, RESPONSES),
    Bad("a lost response in the background", (400,), {"input": "x", "background": True, "store": False}, RESPONSES),
    Bad("a continuation of nothing", (404,), {"input": "x", "previous_response_id": "resp_none"}, RESPONSES),
    Bad("an unknown response", (404,), None, f"{RESPONSES}/resp_none", method="GET"),
    Bad("a cancel of an unknown response", (404,), None, f"{RESPONSES}/resp_none/cancel"),
    Bad("an abort without ids", (400,), {}, "/abort_requests"),
    Bad("tokens outside of the vocabulary", (400,), {"tokens": [-1]}, "/detokenize"),
)  # fmt: skip

# What is no HTTP, or hardly. The server answers 400, or closes the connection.
NO_HTTP = (
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # the beginning of TLS
    b"GET /nothing HTTP/9.9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: minus\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n",
    b"\r\n" * 100,
)


def encoded(body: Any) -> bytes | None:
    """A body as it is sent; None: there is none."""
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()

"""Chats over a few common beginnings, held with a server or with what is in front of several."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import random
import time
from typing import Any, NamedTuple

WORDS = (
    "the", "lighthouse", "keeper", "walks", "along", "harbour", "bread", "museum", "library",
    "robot", "river", "garden", "town", "bicycle", "sky", "night",
)  # fmt: skip
CHATS, SYSTEMS, TURNS = 16, 4, 3


def post(port: int, body: dict[str, Any], session: str = "") -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    headers = {"content-type": "application/json", "x-session-id": session}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def answered(port: int, body: dict[str, Any], session: str = "", tries: int = 1) -> dict[str, Any]:
    """Return an answer, asked for again after an error of the server or of the connection."""
    for left in reversed(range(tries)):
        try:
            status, text = post(port, body, session)
        except OSError as error:
            status, text = 0, str(error).encode()
        if status == 200:
            return json.loads(text)
        assert left and (status == 0 or status >= 500), (status, text)
        time.sleep(0.5)
    raise AssertionError("no try is left")


def is_ready(port: int) -> bool:
    """Return whether models are served at a port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Served(NamedTuple):
    """What a load has got: the texts of each chat, and tokens of prompts and those that were cached."""

    texts: list[list[str]]
    prompt_tokens: int
    cached_tokens: int


def load(port: int, tries: int = 1) -> Served:
    """Hold chats over a few common beginnings, four at a time."""
    rng = random.Random(0)
    beginnings = [" ".join(rng.choice(WORDS) for _ in range(120)) for _ in range(SYSTEMS)]

    def chat(number: int) -> tuple[list[str], int, int]:
        own = random.Random(number)
        first = beginnings[number % SYSTEMS] + " " + " ".join(own.choice(WORDS) for _ in range(5))
        messages, texts, tokens, cached = [{"role": "user", "content": first}], [], 0, 0
        for _ in range(TURNS):
            answer = answered(port, {
                "model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 1.0, "seed": number,
                "ignore_eos": True,
            }, f"chat {number}", tries)  # fmt: skip
            tokens += answer["usage"]["prompt_tokens"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            texts.append(answer["choices"][0]["message"]["content"])
            question = " ".join(own.choice(WORDS) for _ in range(8))
            messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": question}]
        return texts, tokens, cached

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(chat, range(CHATS)))
    return Served([texts for texts, _, _ in found], sum(each[1] for each in found), sum(each[2] for each in found))

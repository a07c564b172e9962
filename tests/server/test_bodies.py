"""Bodies that would stop everything else: read up to their first error, within bounds, and beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from jaxinfer.server import bodies, json_text
from jaxinfer.server.bodies import read_body, read_body_as, validated
from jaxinfer.server.errors import ApiError
from jaxinfer.server.messages_request import chat_request_of
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.completions import CompletionRequest
from jaxinfer.server.protocol.messages import MessagesRequest
from jaxinfer.server.protocol.responses import ResponsesRequest
from jaxinfer.server.settings import ServerSettings
from tests.event_loop import turns_beside

MANY = 100_000
USER = {"role": "user", "content": "x"}


class Given:
    """A request with a body; without one, nothing comes."""

    def __init__(self, body: bytes | None, **headers: str) -> None:
        self._body, self.headers = body, {"content-type": "application/json", **headers}

    async def stream(self) -> Any:
        if self._body is None:
            await asyncio.sleep(60)
        yield self._body


class Reading:
    """A service, as far as bodies know it."""

    def __init__(self, most: int = 1 << 25) -> None:
        self.settings = ServerSettings(max_body_bytes=most)

    def check_ready(self) -> None:
        pass


def read(given: Given, model: Any, most: int = 1 << 25) -> Any:
    return asyncio.run(read_body(Reading(most), given, model))  # pyright: ignore[reportArgumentType]


def refusal(model: Any, given: Any, most: int = 1 << 25) -> ApiError:
    with pytest.raises(ApiError) as found:
        read(Given(json.dumps(given).encode()), model, most)
    return found.value


@pytest.mark.parametrize(
    "model, given, param",
    [
        (ChatRequest, {"messages": [1] * MANY}, "messages.0"),
        (ChatRequest, {"messages": [USER | {"content": [1] * MANY}]}, "messages.0.content.0"),
        (ChatRequest, {"messages": [USER], "stop": [1] * MANY}, "stop.0"),
        (CompletionRequest, {"prompt": [1.5] * MANY}, "prompt.0"),
        (CompletionRequest, {"prompt": ["a", *[1] * MANY]}, "prompt.1"),
        (ResponsesRequest, {"input": [1] * MANY}, "input.0"),
        (MessagesRequest, {"max_tokens": 1, "messages": [1] * MANY}, "messages.0"),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER], "tools": [1] * MANY}, "tools.0"),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER | {"content": [1] * MANY}]}, "messages.0.content.0"),
    ],
)
def test_a_list_is_read_up_to_its_first_error(model, given, param):
    error = refusal(model, given)
    assert error.status == 400 and error.param == param and error.message.count(";") < 3


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [USER] * MANY},
        {"logit_bias": dict.fromkeys(map(str, range(MANY)))},
        {"messages": [USER | {"content": ["x"] * MANY}]},
    ],
)
def test_a_body_has_a_bound_of_its_parts(given):
    assert "texts in lists" in refusal(ChatRequest, given).message


def test_a_body_has_a_bound_of_its_values():
    assert "values" in refusal(CompletionRequest, {"prompt": [1] * (json_text.MOST_VALUES + 1)}).message


def test_a_text_with_many_values_is_read_as_a_short_one_is():
    given = {"a": [1, 2.5, "x,y", None, {"b": [True]}] * 50_000, "c": "1e3"}
    assert json_text.loads(json.dumps(given)) == given
    for text, says in (("[1,]", "Expecting value"), ('{"a":1,"a":2}', "twice"), ("[NaN]", "NaN is no number")):
        with pytest.raises(ValueError, match=says):
            json_text.loads(f"[{'1,' * 270_000}{text}]")


def test_the_event_loop_runs_while_many_values_are_read():
    text = json.dumps([12345] * 500_000)
    found, turns = turns_beside(lambda: json_text.loads(text))
    assert len(found) == 500_000 and turns > 10


def test_the_event_loop_runs_while_a_model_reads_many_messages():
    given = {"messages": [USER] * 200_000}
    found, turns = turns_beside(lambda: validated(ChatRequest, given))
    assert len(found.messages) == 200_000 and turns > 10


def test_long_bodies_and_what_is_made_of_them_are_read_beside_the_event_loop():
    seen = []

    def made(body: MessagesRequest) -> ChatRequest:
        seen.append(threading.current_thread() is threading.main_thread())
        return chat_request_of(body)

    for count in (1, 1000):
        given = Given(json.dumps({"max_tokens": 1, "messages": [USER] * count}).encode())
        chat = asyncio.run(read_body_as(Reading(), given, MessagesRequest, made))  # pyright: ignore[reportArgumentType]
        assert len(chat.messages) == count
    assert seen == [True, False]


def test_a_body_that_is_announced_too_large_is_not_waited_for():
    begin = time.perf_counter()
    with pytest.raises(ApiError) as found:
        read(Given(None, **{"content-length": "1001"}), ChatRequest, 1000)
    assert found.value.status == 413 and time.perf_counter() - begin < 30


def test_a_body_of_which_nothing_more_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "_MOST_SECONDS", 0.05)
    with pytest.raises(ApiError) as found:
        read(Given(None), ChatRequest, 1000)
    assert found.value.status == 408

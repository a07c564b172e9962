"""Bodies that would stop everything else: read up to their first error, within bounds."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from jaxinfer.server import bodies
from jaxinfer.server.bodies import read_model
from jaxinfer.server.errors import ApiError
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.completions import CompletionRequest
from jaxinfer.server.protocol.messages import MessagesRequest
from jaxinfer.server.protocol.responses import ResponsesRequest

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


def refusal(model: Any, given: Any, most: int = 1 << 25) -> ApiError:
    with pytest.raises(ApiError) as found:
        asyncio.run(read_model(Given(json.dumps(given).encode()), model, most))  # pyright: ignore[reportArgumentType]
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
        (MessagesRequest, {"max_tokens": 1, "messages": [USER | {"content": [1] * MANY}]}, "messages.0.content.0"),
    ],
)
def test_a_list_is_read_up_to_its_first_error(model, given, param):
    error = refusal(model, given)
    assert error.status == 400 and error.param == param and error.message.count(";") < 3


@pytest.mark.parametrize("given", [{"messages": [USER] * MANY}, {"logit_bias": dict.fromkeys(map(str, range(MANY)))}])
def test_a_body_has_a_bound_of_its_parts(given):
    assert "fields and lists" in refusal(ChatRequest, given).message


def test_a_body_that_is_announced_too_large_is_not_waited_for():
    begin = time.perf_counter()
    with pytest.raises(ApiError) as found:
        asyncio.run(read_model(Given(None, **{"content-length": "1001"}), ChatRequest, 1000))  # pyright: ignore[reportArgumentType]
    assert found.value.status == 413 and time.perf_counter() - begin < 30


def test_a_body_of_which_nothing_more_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "_MOST_SECONDS", 0.05)
    with pytest.raises(ApiError) as found:
        asyncio.run(read_model(Given(None), ChatRequest, 1000))  # pyright: ignore[reportArgumentType]
    assert found.value.status == 408

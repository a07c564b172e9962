"""Long requests: what their reading takes is done beside the event loop, which serves others meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.outputs import CompletionOutput, EngineFailure, Logprob, RequestOutput
from jaxinfer.server import chat_request, completion_request, responses
from jaxinfer.server.answering import collected
from jaxinfer.server.endpoints import Endpoints
from jaxinfer.server.errors import ApiError
from jaxinfer.server.messages import Messages
from jaxinfer.server.operations import Operations
from jaxinfer.server.render import Render
from jaxinfer.server.response_store import StoredResponse
from jaxinfer.server.responses import ResponsesEndpoints
from jaxinfer.server.running import Running
from jaxinfer.server.service import Service
from jaxinfer.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "x"}]
CASES: list[tuple[Any, str, str, dict[str, Any], str]] = [
    (Endpoints, "chat", "tokens_of_messages", {"messages": MESSAGES}, "chat_request"),
    (Endpoints, "completions", "prompts_of", {"prompt": "x"}, "completion_request"),
    (Render, "messages", "tokens_of_messages", {"messages": MESSAGES, "max_tokens": 1}, "chat_request"),
    (Messages, "create", "tokens_of_messages", {"messages": MESSAGES, "max_tokens": 1}, "chat_request"),
    (Messages, "count_tokens", "tokens_of_messages", {"messages": MESSAGES}, "chat_request"),
    (ResponsesEndpoints, "create", "_conversation", {"input": "x"}, "responses"),
    (ResponsesEndpoints, "create", "listed_items", {"input": "x"}, "responses"),
    (ResponsesEndpoints, "render", "_conversation", {"input": "x"}, "responses"),
    (Operations, "tokenize", "tokens_of_messages", {"messages": MESSAGES}, "operations"),
]


class Told(Exception):
    """Where a function was called."""


class Quiet:
    """An engine that only takes prompts."""

    config = SimpleNamespace(max_num_seqs=8, max_model_len=64)

    def check_alive(self) -> None:
        pass

    def render(self, messages: Any, **arguments: Any) -> dict[str, Any]:
        return {"prompt_token_ids": [1]}

    def default_sampling_params(self, **given: Any) -> Any:
        from jaxinfer.sampling_params import SamplingParams

        return SamplingParams(**given)

    def get_tokenizer(self) -> Any:
        hf = SimpleNamespace(chat_template="")
        return SimpleNamespace(hf=hf, encode=lambda *_, **__: [1], decode=lambda *_, **__: "")


class Request:
    """A request of HTTP with a body."""

    def __init__(self, body: Any = None, **query: str) -> None:
        self.headers, self.query_params = {"content-type": "application/json"}, query
        self.path_params = {"response_id": "a"}
        self.scope = {"owner": "", "request_id": "1", "has_request_id": True}
        self._body = json.dumps(body).encode()

    async def stream(self) -> Any:
        yield self._body


def service() -> Service:
    found = Service(ServerSettings(), "tiny")
    found.open(Quiet())  # pyright: ignore[reportArgumentType]
    return found


@pytest.mark.parametrize("endpoints, handler, function, body, module", CASES)
def test_conversations_and_prompts_are_read_beside_the_event_loop(
    endpoints, handler, function, body, module, monkeypatch
):
    def told(*_: Any, **__: Any) -> None:
        raise Told(threading.current_thread() is threading.main_thread())

    from jaxinfer.server import operations

    modules = {
        "chat_request": chat_request, "completion_request": completion_request, "responses": responses,
        "operations": operations,
    }  # fmt: skip
    monkeypatch.setattr(modules[module], function, told)
    with pytest.raises(Told) as found:
        asyncio.run(getattr(endpoints(service()), handler)(Request(body)))
    assert found.value.args == (False,)


def test_a_stored_conversation_and_its_items_are_read_beside_the_event_loop(monkeypatch):
    loads, threads = responses.loads, []

    def noted(text: str) -> Any:
        threads.append(threading.current_thread())
        return loads(text)

    monkeypatch.setattr(responses, "loads", noted)
    found = ResponsesEndpoints(service())
    items = json.dumps([{"type": "message", "id": "i", "role": "user", "content": "x"}]).encode()
    found._store.put("", "a", StoredResponse("completed", b'{"output": []}', items))

    async def ask() -> None:
        await found.render(Request({"input": "y", "previous_response_id": "a"}))  # pyright: ignore[reportArgumentType]
        await found.input_items(Request())  # pyright: ignore[reportArgumentType]
        with pytest.raises(ApiError, match="after"):
            await found.input_items(Request(after="none"))  # pyright: ignore[reportArgumentType]

    asyncio.run(ask())
    assert len(threads) == 4 and threading.main_thread() not in threads


class Once:
    """A source of one output."""

    def __init__(self, count: int, error: str | None = None) -> None:
        entries = [{5: Logprob(-1.0, 1)}] * count
        reason = "length" if error is None else "error"
        part = CompletionOutput(0, "x", [5] * count, logprobs=entries, finish_reason=reason)
        self._output = RequestOutput("0", None, [1], [part], finished=True, error=error)

    async def __anext__(self) -> RequestOutput:
        return self._output

    def abort(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Threads:
    """An answer that notes in which threads it is written."""

    def __init__(self) -> None:
        self.of: list[bool] = []

    def add(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        self.of.append(threading.current_thread() is threading.main_thread())
        return []

    def whole(self) -> dict[str, Any]:
        self.add(0, Once(0)._output)
        return {}


@pytest.mark.parametrize(("count", "is_beside"), [(8, False), (100, True)])
def test_long_lists_of_log_probabilities_are_written_beside_the_event_loop(count, is_beside):
    running, answer = Running(), Threads()
    running.add(Once(count))
    asyncio.run(collected(service(), running, answer))  # pyright: ignore[reportArgumentType]
    assert answer.of == [not is_beside] * 2


@pytest.mark.parametrize(("error", "status"), [("nothing may follow", 400), (EngineFailure("RuntimeError: /x"), 500)])
def test_what_the_engine_has_failed_at_is_no_error_of_the_request(error, status):
    running = Running()
    running.add(Once(1, error))
    with pytest.raises(ApiError) as found:
        asyncio.run(collected(service(), running, Threads()))  # pyright: ignore[reportArgumentType]
    assert found.value.status == status and ("/x" in str(found.value)) is False

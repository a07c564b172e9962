"""Anthropic's own client against the server: answers, streams, counts and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.server.processes import SMALL, Server, serving

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "server.md"
PATH, CHAT = "/v1/messages", "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "How old is the lighthouse?"}]
ANSWER = "The lighthouse is two hundred years old and has ninety steps."
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "extra_body": {"temperature": 0}}
SEEDED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 30,
    "extra_body": {"temperature": 0.9, "seed": 5, "min_p": 0.01},
}
ENDLESS = {"temperature": 1.0, "ignore_eos": True}


@pytest.fixture
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def body(given: dict[str, Any]) -> dict[str, Any]:
    """The body that the client sends for its arguments."""
    return {"messages": QUESTION, **given, **given["extra_body"]} | {"extra_body": None}


def events(server: Server, given: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of the events of a stream."""
    status, headers, text = server.request("POST", PATH, body(given) | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    blocks = [block.split("\n") for block in text.decode().split("\n\n")[:-1]]
    assert all(len(lines) == 2 for lines in blocks)  # no line of id or retry
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_conversation_is_answered(client):
    answer = client.messages.create(messages=QUESTION, **GREEDY)
    assert answer.content[0].to_dict() == {"type": "text", "text": ANSWER} and len(answer.content) == 1
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.id == f"msg_{answer._request_id}" and answer.usage.output_tokens > 10


def test_the_client_of_beta_features_is_answered_too(client):
    answer = client.beta.messages.create(messages=QUESTION, **GREEDY, betas=["interleaved-thinking-2025-05-14"])
    assert answer.content[0].text == ANSWER


@pytest.mark.parametrize("given", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_text_is_that_of_a_chat(server, client, given):
    system = {"system": [{"type": "text", "text": "Be brief."}]}
    chat = body(given) | {"messages": [{"role": "system", "content": "Be brief."}, *QUESTION]}
    expected = server.json("POST", CHAT, chat)["choices"][0]["message"]["content"]
    assert client.messages.create(messages=QUESTION, **system, **given).content[0].text == expected != ""
    with client.messages.stream(messages=QUESTION, **system, **given) as stream:
        assert "".join(stream.text_stream) == expected


@pytest.mark.parametrize("given", [GREEDY, SEEDED, GREEDY | {"max_tokens": 3}], ids=["greedy", "seeded", "cut"])
def test_a_stream_accumulates_to_the_whole_answer(client, given):
    headers = {"X-Request-Id": "one"}
    with client.messages.stream(messages=QUESTION, **given, extra_headers=headers) as stream:
        texts = [event.text for event in stream if event.type == "text"]
        found = stream.get_final_message()
    whole = client.messages.create(messages=QUESTION, **given, extra_headers=headers)
    assert "".join(texts) == found.content[0].text
    same = {"exclude": {"usage": True, "content": {"__all__": {"parsed_output"}}}}
    assert found.model_dump(**same) == whole.model_dump(**same)
    assert found.usage.output_tokens == whole.usage.output_tokens
    assert total(found.usage) == total(whole.usage)


def total(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_the_first_event_has_all_that_clients_need(server):
    (name, first), *rest = events(server, GREEDY)
    message, usage = first["message"], first["message"].pop("usage")
    assert name == first["type"] == "message_start"
    assert message | {"id": ""} == {
        "id": "", "type": "message", "role": "assistant", "model": "tiny", "content": [], "stop_reason": None,
        "stop_sequence": None,
    }  # fmt: skip
    assert usage["input_tokens"] > 5 and usage["output_tokens"] == 0
    assert [name for name, _ in rest if name != "content_block_delta"] == [
        "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert all(name == event["type"] for name, event in rest)


def test_cached_tokens_are_counted_apart_at_the_end(server, client):
    given = GREEDY | {"system": "The keeper of the lighthouse speaks slowly. " * 12}
    server.json("POST", PATH, body(given))
    *_, (_, delta), _ = events(server, given)
    whole = client.messages.create(messages=QUESTION, **given).usage
    assert delta["usage"]["cache_read_input_tokens"] == whole.cache_read_input_tokens > 50
    assert delta["usage"]["input_tokens"] == whole.input_tokens < 50
    assert client.messages.count_tokens(model="tiny", system=given["system"], messages=QUESTION).input_tokens == total(
        whole
    )


def test_conversations_that_are_too_long_are_counted_too(client):
    long = [{"role": "user", "content": "word " * 3000}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > 3000
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context length"):
        client.messages.create(messages=long, **GREEDY)


def test_a_stop_sequence_is_named(client):
    given = GREEDY | {"stop_sequences": ["ninety", " two"]}
    whole = client.messages.create(messages=QUESTION, **given)
    assert (whole.stop_reason, whole.stop_sequence, whole.content[0].text) == (
        "stop_sequence", " two", "The lighthouse is",
    )  # fmt: skip
    with client.messages.stream(messages=QUESTION, **given) as stream:
        found = stream.get_final_message()
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == (
        "stop_sequence", " two", "The lighthouse is",
    )  # fmt: skip


def test_an_answer_that_is_cut_says_why(client):
    cut = client.messages.create(messages=QUESTION, **GREEDY | {"max_tokens": 3})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    long = [{"role": "user", "content": "word " * 980}]
    full = client.messages.create(model="tiny", max_tokens=5000, messages=long, extra_body=ENDLESS)
    assert full.stop_reason == "model_context_window_exceeded"
    assert total(full.usage) + full.usage.output_tokens == 1024


def test_a_last_answer_is_continued(client):
    begun = [*QUESTION, {"role": "assistant", "content": "The lighthouse is two"}]
    assert client.messages.create(messages=begun, **GREEDY).content[0].text == ANSWER.removeprefix(begun[1]["content"])


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    keeps_the_light: bool


def test_an_answer_is_parsed_as_a_model(client):
    given = GREEDY | {"max_tokens": 150, "messages": QUESTION, "output_format": Person}
    parsed = client.messages.parse(**given).parsed_output
    assert isinstance(parsed, Person)
    with client.messages.stream(**given) as stream:
        assert stream.get_final_message().parsed_output == parsed


@pytest.mark.parametrize(
    "given, says",
    [
        ({"messages": []}, "messages: List should have at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.*image"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 1e40}}, "temperature must be"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "structured_outputs"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305 is not served"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "no tool calls"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_the_field(client, given, says, stream):
    with pytest.raises(anthropic.BadRequestError, match=says) as found:
        client.messages.create(**{"messages": QUESTION, **GREEDY, **given}, stream=stream)
    error = found.value
    assert error.type == "invalid_request_error" and error.body["request_id"] == error.request_id


def test_max_tokens_is_required(server):
    for path, status in ((PATH, 400), (f"{PATH}/count_tokens", 200)):
        found, _, answer = server.request("POST", path, {"model": "tiny", "messages": QUESTION})
        assert found == status and (status == 200 or "max_tokens: Field required" in answer.decode())


def test_errors_have_their_classes(client):
    with pytest.raises(anthropic.NotFoundError, match="The model `other` does not exist") as found:
        client.messages.create(messages=QUESTION, **GREEDY | {"model": "other"})
    assert found.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.count_tokens(model="other", messages=QUESTION)
    with pytest.raises(anthropic.NotFoundError, match="there is nothing at /v1/messages/batches") as found:
        client.messages.batches.list()
    assert found.value.type == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError, match="a valid API key is needed") as denied:
        client.with_options(api_key="wrong").messages.create(messages=QUESTION, **GREEDY)
    assert denied.value.type == "authentication_error"
    with pytest.raises(anthropic.APIStatusError) as large:
        client.messages.create(messages=[{"role": "user", "content": "x" * (32 << 20)}], **GREEDY)
    assert large.value.status_code == 413 and large.value.type == "request_too_large"


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens", f"{PATH}/render", f"{PATH}/other"])
def test_every_error_of_a_path_has_the_form_of_its_clients(server, path):
    asked = [
        ("POST", b"{", {}, (400, 404)), ("POST", b"{}", {"authorization": "Bearer x"}, (401,)),
        ("GET", None, {}, (404, 405)),
    ]  # fmt: skip
    for method, content, headers, statuses in asked:
        status, found, answer = server.request(method, path, content, headers)
        error = json.loads(answer)
        assert status in statuses and set(error) == {"type", "error", "request_id"} and error["type"] == "error"
        assert set(error["error"]) == {"type", "message"} and error["request_id"] == found["request-id"]


def test_many_errors_make_a_short_answer(server):
    bodies = (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", {"messages": [{"role": 1}] * 12_000, "max_tokens": 1})
    for content in bodies:
        status, _, answer = server.request("POST", PATH, content)
        assert status == 400 and len(answer) < 16_000 and json.loads(answer)["type"] == "error"


def test_keys_come_as_older_clients_send_them(server):
    asked = body(GREEDY)
    for key, status in (("secret", 200), ("wrong", 401)):
        headers = {"authorization": "", "x-api-key": key, "anthropic-version": "2023-06-01"}
        assert server.request("POST", PATH, asked, headers)[0] == status


def test_an_error_amid_a_stream_is_raised(server, client):
    given = {"model": "tiny", "max_tokens": 900, "extra_body": ENDLESS, "extra_headers": {"X-Request-Id": "amid"}}
    types = []
    with pytest.raises(anthropic.APIStatusError, match="aborted") as found:
        for event in client.messages.create(messages=QUESTION, stream=True, **given):
            types.append(event.type)
            if event.type == "content_block_delta" and types.count("content_block_delta") == 1:
                server.json("POST", "/abort_requests", {"request_ids": ["amid"]})
    assert found.value.type == "overloaded_error" and found.value.body["request_id"] == "amid"
    assert types[:2] == ["message_start", "content_block_start"] and "message_stop" not in types


def test_clients_try_again_while_the_server_loads_or_is_full():
    with serving(*SMALL, "--max-num-seqs", "1", "--max-waiting-requests", "0", key="secret", ready=False) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
        with pytest.raises(anthropic.InternalServerError, match="loading") as found:
            client.messages.create(messages=QUESTION, **GREEDY)
        assert found.value.type == "overloaded_error" and found.value.response.headers["retry-after"]
        patient = client.with_options(max_retries=60)
        assert patient.messages.create(messages=QUESTION, **GREEDY).content[0].text == ANSWER
        endless = {"model": "tiny", "max_tokens": 900, "extra_body": ENDLESS}
        with client.messages.create(messages=QUESTION, stream=True, **endless) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.InternalServerError, match="the queue is full") as full:
                client.messages.create(messages=QUESTION, stream=True, **GREEDY)
            assert full.value.type == "overloaded_error"
        assert patient.messages.create(messages=QUESTION, **GREEDY).content[0].text == ANSWER


def test_the_example_of_the_guide_runs(server, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "anthropic" in block]
    code = code.replace("http://127.0.0.1:8000", server.url).replace('api_key="none"', 'api_key="secret"')
    exec(compile(code, GUIDE.name, "exec"), {})
    assert "lighthouse" in capsys.readouterr().out

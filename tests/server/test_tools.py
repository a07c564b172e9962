"""Tool calls through chat: grammars of required calls, streams, histories, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": SCHEMA}}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
REFUSED = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
GIVEN: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "How is the weather?"}], "temperature": 0.7, "seed": 3,
    "max_tokens": 120, "tools": [WEATHER, NOW],
}  # fmt: skip


@pytest.fixture
def client(talking):
    return openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_validates(client, choice):
    (found,) = client.chat.completions.create(**GIVEN, tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = found.message.tool_calls
    assert found.message.content is None
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert isinstance(choice, str) or call.function.name == "weather"
    assert found.finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_calls_accumulates_to_the_whole_answer(client, seed):
    given = GIVEN | {"seed": seed, "tool_choice": "required", "parallel_tool_calls": False}
    headers = {"X-Request-Id": "the-same-for-all-calls"}
    whole = client.chat.completions.create(**given, extra_headers=headers).choices[0]
    with client.chat.completions.stream(**given, extra_headers=headers) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        found = stream.get_final_completion().choices[0]
    assert [
        call.model_dump(exclude={"index": True, "id": True, "function": {"parsed_arguments"}})
        for call in found.message.tool_calls
    ] == [call.model_dump(exclude={"id"}) for call in whole.message.tool_calls]
    ids = [call.id for call in (*found.message.tool_calls, *whole.message.tool_calls)]
    assert len(set(ids)) == len(ids)
    assert found.finish_reason == whole.finish_reason
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    named = [call for call in deltas if call.id is not None]
    assert [call.index for call in named] == list(range(len(whole.message.tool_calls)))
    assert all(call.function.name and call.type == "function" for call in named)


def test_an_answer_may_be_text_although_there_are_tools(client):
    (found,) = client.chat.completions.create(**GIVEN).choices
    assert found.message.content and not found.message.tool_calls and found.finish_reason in ("stop", "length")
    (other,) = client.chat.completions.create(**GIVEN, tool_choice="none").choices
    assert other.message.content and not other.message.tool_calls


def test_an_answer_without_calls_is_the_same_beside_strict_tools(client):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    (free,) = client.chat.completions.create(**GIVEN).choices
    (found,) = client.chat.completions.create(**{**GIVEN, "tools": [strict, NOW]}).choices
    assert found.message.content == free.message.content and found.finish_reason == free.finish_reason


def test_calls_and_results_are_part_of_the_conversation(talking):
    calls = [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    ]
    messages = [
        *GIVEN["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": "It is sunny.", "tool_calls": []},
        {"role": "user", "content": "Thanks."},
    ]
    answer = talking.json("POST", "/v1/chat/completions", GIVEN | {"messages": messages, "return_token_ids": True})
    text = talking.json("POST", "/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call><|end|>' in text
    assert "<tool_response>sunny</tool_response>" in text and text.endswith(
        "It is sunny.<|end|><|user|>Thanks.<|end|><|assistant|>"
    )
    for arguments in ("[1]", "{", "3"):
        calls[0]["function"]["arguments"] = arguments
        status, _, body = talking.request("POST", "/v1/chat/completions", GIVEN | {"messages": messages})
        assert status == 400 and b"arguments of weather" in body


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_of_answers_leaves_room_for_calls(talking, strict):
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}
    body = GIVEN | {
        "tools": [tool], "response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}},
    }  # fmt: skip
    for seed in range(4):
        (choice,) = talking.json(
            "POST", "/v1/chat/completions", body | {"temperature": 1.5, "seed": seed, "max_tokens": 80}
        )["choices"]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["sky"] in ("blue", "grey")
        else:
            assert choice["finish_reason"] in ("tool_calls", "length")
    forced = body | {"tool_choice": "required", "max_tokens": 80}
    (choice,) = talking.json("POST", "/v1/chat/completions", forced)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather" and not choice["message"]["content"]


@pytest.mark.parametrize(
    "more, says",
    [
        ({"tools": []}, "empty"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "does not have"),
        ({"tools": None, "tool_choice": "required"}, "needs tools"),
        ({"structured_outputs": {"regex": "a"}}, "tools go without structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "pattern"),
        ({"tool_choice": "required", "tools": [REFUSED]}, "not"),
        ({"tools": [{"type": "function", "function": {**REFUSED["function"], "strict": True}}]}, "not"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(talking, more, says):
    status, _, body = talking.request("POST", "/v1/chat/completions", GIVEN | more)
    assert status == 400 and says in json.loads(body)["error"]["message"]


def test_a_model_without_calls_refuses_tools(server):
    status, _, body = server.request("POST", "/v1/chat/completions", GIVEN)
    assert status == 400 and "no tool calls" in json.loads(body)["error"]["message"]

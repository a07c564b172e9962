"""Kinds of requests, and the same conversation in the words of all endpoints."""

import json
import random

import pytest

from soaking.answers import CONVERSATIONS, MESSAGES, READERS, RESPONSES
from soaking.asked import Asked
from soaking.requests import KINDS, MOST_DISTINCT, TOOLS, distinct_requests
from soaking.surfaces import as_message, as_response

SCHEMA = {"type": "object"}
ASKED = Asked(
    CONVERSATIONS,
    {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "temperature": 0.0, "seed": 3, "ignore_eos": True, "max_tokens": 7, "stop": [" the"], "return_token_ids": True,
        "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    },
    {"call": "answer"},
)  # fmt: skip


def test_requests_are_of_all_kinds_and_the_same_again():
    requests = distinct_requests(MOST_DISTINCT, 3)
    assert {request.kind for request in requests} == {kind.name for kind in KINDS}
    assert [request.number for request in requests] == list(range(MOST_DISTINCT))
    assert len({json.dumps(request.asked.body) for request in requests}) > 0.9 * MOST_DISTINCT
    assert requests == distinct_requests(MOST_DISTINCT, 3) and requests != distinct_requests(MOST_DISTINCT, 4)
    assert {request.asked.path for request in requests} == READERS.keys()
    for count in (len(KINDS) - 1, MOST_DISTINCT + 1):
        with pytest.raises(ValueError, match="the number of distinct requests must be in"):
            distinct_requests(count, 0)


def test_a_conversation_is_asked_in_anthropics_words():
    found = as_message(ASKED)
    function = TOOLS[0]["function"]
    assert found.path == MESSAGES and found.offline == {"call": "answer", "surface": "messages"}
    tools = found.body.pop("tools")
    assert tools[0] == {"name": "describe", "description": "a person", "input_schema": function["parameters"]}
    assert tools[1].keys() == {"name", "input_schema"}
    assert found.body == {
        "system": "Be kind.", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0.0, "seed": 3,
        "ignore_eos": True, "max_tokens": 7, "stop_sequences": [" the"],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }  # fmt: skip


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_conversation_is_asked_in_the_words_of_responses(is_stored, with_tokens):
    found = as_response(ASKED, is_stored=is_stored, with_tokens=with_tokens)
    of_tokens = {"include": ["message.output_text.logprobs"], "return_tokens_as_token_ids": True}
    assert found.path == RESPONSES
    assert found.offline == {"call": "answer", "surface": "responses", "has_tokens": with_tokens}
    assert found.body == {
        "instructions": "Be kind.", "input": [{"role": "user", "content": "Hello"}], "temperature": 0.0, "seed": 3,
        "ignore_eos": True, "max_output_tokens": 7, "stop": [" the"], "tool_choice": "required",
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS], "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
        **({} if is_stored else {"store": False}), **(of_tokens if with_tokens else {}),
    }  # fmt: skip


CALL = {"id": "c", "type": "function", "function": {"name": "describe", "arguments": '{"age": 3}'}}
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "kind"},
]


def test_calls_and_their_results_are_blocks_of_messages_and_items_of_responses():
    asked = ASKED._replace(body={"messages": TURNS})
    use = {"type": "tool_use", "id": "c", "name": "describe", "input": {"age": 3}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "kind"}
    assert as_message(asked).body["messages"] == [
        TURNS[0], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    assert as_response(asked).body["input"] == [
        TURNS[0],
        {"type": "function_call", "call_id": "c", "name": "describe", "arguments": '{"age": 3}'},
        {"type": "function_call_output", "call_id": "c", "output": "kind"},
    ]


def test_a_continued_response_is_stored_and_its_history_is_that_of_the_first():
    (kind,) = [kind for kind in KINDS if kind.name == "continued response"]
    asked = kind.make(random.Random(3))
    assert kind.has_manner and asked.then is not None and asked.path == RESPONSES
    assert "store" not in asked.body and len(asked.then["input"]) == 1
    assert asked.offline["call"] == "continued"
    assert asked.offline["then"]["messages"] == asked.then["input"]
    assert asked.offline["first"]["messages"][-1] == asked.body["input"][-1]

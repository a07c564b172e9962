"""Bodies of responses as conversations of chat, item by item; what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError
from jaxinfer.server.protocol.responses import ResponsesRequest
from jaxinfer.server.responses_request import chat_request, echo_of, listed_items, own_items

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
SAID = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "parameters": {"type": "object"}, "strict": True}
TOOL = {"type": "function", **FUNCTION}


def asked(**body: Any) -> dict[str, Any]:
    """What chat is asked for, without what is not set."""
    request = ResponsesRequest.model_validate({"input": "Hi"} | body)
    return chat_request(request, own_items(request)).model_dump(exclude_none=True)


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    "given, messages",
    [
        ("Hi", [USER]),
        ([USER], [USER]),
        ([{"type": "message", "role": "developer", "content": [part("Hi")]}], [{"role": "developer", "content": "Hi"}]),
        (
            [{"role": "user", "content": [part("Hi"), part("you")]}],
            [{"role": "user", "content": [part("Hi", "text"), part("you", "text")]}],
        ),
        ([USER, SAID, USER], [USER, {"role": "assistant", "content": "Hello"}, USER]),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}],
            [{"role": "assistant", "content": "No"}],
        ),
        ([THOUGHT, SAID], [{"role": "assistant", "content": "Hello", "reasoning_content": "So."}]),
        ([THOUGHT, USER, SAID], [USER, {"role": "assistant", "content": "Hello"}]),
        (
            [USER, THOUGHT, CALL, OUTPUT],
            [
                USER, {"role": "assistant", "reasoning_content": "So.", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "sunny"},
            ],
        ),
        (
            [SAID, CALL, CALL | {"call_id": "d"}, OUTPUT | {"output": [part("rain")]}, OUTPUT | {"call_id": "d"}],
            [
                {"role": "assistant", "content": "Hello", "tool_calls": [CALLED, CALLED | {"id": "d"}]},
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
                {"role": "tool", "tool_call_id": "d", "content": "sunny"},
            ],
        ),
        (
            [SAID, CALL, SAID, OUTPUT],
            [
                {"role": "assistant", "content": "HelloHello", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "sunny"},
            ],
        ),
        ([SAID, SAID], [{"role": "assistant", "content": "Hello"}] * 2),
        ([THOUGHT, SAID, THOUGHT, SAID], [{"role": "assistant", "content": "Hello", "reasoning_content": "So."}] * 2),
    ],
)  # fmt: skip
def test_items_become_messages(given, messages):
    assert asked(input=given) == {"messages": messages}


def test_instructions_come_first():
    assert asked(instructions="Be brief.")["messages"] == [{"role": "system", "content": "Be brief."}, USER]
    # Many templates allow one message of the system, at the beginning.
    given = [{"role": "developer", "content": "In French."}, {"role": "system", "content": "Kindly."}, USER]
    system = {"role": "system", "content": "Be brief.\nIn French.\nKindly."}
    assert asked(instructions="Be brief.", input=given)["messages"] == [system, USER]
    assert asked(input=given)["messages"] == given


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0.5, "top_p": 0.9, "stream": True}, {"temperature": 0.5, "top_p": 0.9, "stream": True}),
        ({"seed": 3, "top_k": 5, "stop": ["x"], "n": 1}, {"seed": 3, "top_k": 5, "stop": ["x"], "n": 1}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema_": {"type": "object"}}}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False,
            },
        ),
        ({"tools": [], "tool_choice": "auto"}, {}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"summary": "auto"}}, {}),
        (
            {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"metadata": {"a": "b"}, "store": False, "service_tier": "flex", "truncation": "disabled"}, None),
        ({"max_tool_calls": 3, "prompt_cache_key": "k", "conversation": None}, None),
    ],
)  # fmt: skip
def test_fields_become_those_of_chat(given, expected):
    found = asked(**given)
    assert found.pop("messages") == [USER]
    if expected is not None:
        assert found == expected


def test_effort_is_ignored_where_the_template_has_no_switch():
    request = ResponsesRequest.model_validate({"input": "Hi", "reasoning": {"effort": "none"}})
    assert chat_request(request, own_items(request)).chat_template_kwargs is None


@pytest.mark.parametrize(
    "given, param, says",
    [
        ({"input": []}, "input", "at least one"),
        ({"input": None}, "input", "at least one"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "references"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input.1", "web_search_call"),
        ({"input": [{"role": "user"}]}, "input.0", "content"),
        ({"input": [{"content": "x"}]}, "input.0", "role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content", "needs its text"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0", "arguments"),
        ({"input": [OUTPUT]}, "input.0", "there is no call c"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input.1", "output"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"n": 2}, "n", "one answer"),
        ({"branches": ["a"]}, "branches", "one answer"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"logprobs": True}, "logprobs", "include"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": ["message.output_text.logprobs"], "tools": [TOOL]}, "include", "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools", "name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "allowed_tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs schema"),
        ({"background": True, "stream": True}, "background", "poll"),
        ({"background": True, "store": False}, "background", "store"),
        ({"seed": "x"}, "seed", "integer"),
        ({"stream_options": 3}, "stream_options", "dictionary"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given, param, says):
    with pytest.raises(ApiError, match=says) as found:
        asked(**given)
    assert found.value.status == 400 and found.value.param == param


def test_a_response_repeats_what_was_asked():
    body = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "tools": [TOOL], "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 5, "previous_response_id": "resp_1",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
        "reasoning": {"effort": "low"}, "background": True,
    }  # fmt: skip
    found = echo_of(ResponsesRequest.model_validate(body), SamplingParams(temperature=0.5, top_p=0.25))
    tool = TOOL | {"description": None}
    assert found == {name: value for name, value in found.items() if name not in body} | body | {
        "tools": [tool], "reasoning": {"effort": "low", "summary": None}
    }  # fmt: skip
    assert found["temperature"] == 0.5 and found["top_p"] == 0.25 and found["truncation"] == "disabled"
    plain = echo_of(ResponsesRequest(), SamplingParams())
    assert plain["text"] == {"format": {"type": "text"}} and plain["tool_choice"] == "auto" and plain["tools"] == []
    assert plain["parallel_tool_calls"] is True and plain["metadata"] == {} and plain["background"] is False


def test_items_are_listed_with_ids_and_parts():
    request = ResponsesRequest.model_validate({"input": [USER, SAID | {"id": "mine"}, CALL]})
    first, second, third = listed_items(request.input, "n")
    assert first == {
        "type": "message", "id": "item_n_0", "status": "completed", "role": "user", "content": [part("Hi")]
    }  # fmt: skip
    assert second == SAID | {"id": "mine", "status": "completed"}
    assert third == CALL | {"id": "item_n_2", "status": "completed"}

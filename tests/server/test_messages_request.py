"""What a request of Anthropic's API becomes: a table of messages, tools and settings, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.server.bodies import validated
from jaxinfer.server.errors import ApiError
from jaxinfer.server.messages_request import chat_request_of
from jaxinfer.server.protocol.messages import CountTokensRequest, MessagesRequest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "the weather", "input_schema": SCHEMA, "cache_control": {"type": "x"}}
ASKED = {"role": "user", "content": "How is it?"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def chat(messages: Any, **more: Any) -> dict[str, Any]:
    """The fields that a request has as a conversation, without nulls."""
    body = validated(MessagesRequest, {"max_tokens": 9, "messages": messages, **more})
    return chat_request_of(body).model_dump(exclude_none=True, by_alias=True)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def use(name: str, call: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def result(call: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, **({} if content is None else {"content": content}), **more}


def called(name: str, call: str, **given: Any) -> dict[str, Any]:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": given}}


@pytest.mark.parametrize(
    "given, expected",
    [
        pytest.param([ASKED], [ASKED], id="a text"),
        pytest.param(
            [{"role": "user", "content": [text("a"), text("b") | {"cache_control": {"type": "ephemeral"}}]}],
            [{"role": "user", "content": [text("a"), text("b")]}],
            id="blocks of text",
        ),
        pytest.param([{"role": "user", "content": []}], [{"role": "user", "content": ""}], id="no block"),
        pytest.param(
            [ASKED, {"role": "assistant", "content": [text("Let me "), text("see.")]}, ASKED],
            [ASKED, {"role": "assistant", "content": "Let me see."}, ASKED],
            id="blocks of an answer are one text",
        ),
        pytest.param(
            [
                ASKED,
                {"role": "assistant", "content": [text("So."), use("weather", "a", city="Rome"), use("now", "b")]},
                {"role": "user", "content": [result("a", "sunny"), result("b", [text("1"), text("2")])]},
            ],
            [
                ASKED,
                {
                    "role": "assistant", "content": "So.",
                    "tool_calls": [called("weather", "a", city="Rome"), called("now", "b")],
                },
                {"role": "tool", "tool_call_id": "a", "content": "sunny"},
                {"role": "tool", "tool_call_id": "b", "content": "1\n2"},
            ],
            id="results in their order",
        ),
        pytest.param(
            [
                ASKED,
                {"role": "assistant", "content": [use("now", "a")]},
                {"role": "user", "content": [text("Well?"), result("a"), text("And?")]},
            ],
            [
                ASKED,
                {"role": "assistant", "content": "", "tool_calls": [called("now", "a")]},
                {"role": "tool", "tool_call_id": "a", "content": ""},
                {"role": "user", "content": [text("Well?"), text("And?")]},
            ],
            id="text beside a result comes after it",
        ),
        pytest.param(
            [
                ASKED,
                {"role": "assistant", "content": [use("now", "a")]},
                {"role": "user", "content": [result("a", "no clock", is_error=True), result("a", "x", is_error=False)]},
            ],
            [
                ASKED,
                {"role": "assistant", "content": "", "tool_calls": [called("now", "a")]},
                {"role": "tool", "tool_call_id": "a", "content": "Error: no clock"},
                {"role": "tool", "tool_call_id": "a", "content": "x"},
            ],
            id="a failed call is seen",
        ),
        pytest.param(
            [
                ASKED,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "s"},
                        {"type": "thinking", "thinking": "m."},
                        {"type": "redacted_thinking", "data": "x"}, text("Fine."),
                    ],
                },
                ASKED,
            ],
            [ASKED, {"role": "assistant", "content": "Fine.", "reasoning_content": "Hmm."}, ASKED],
            id="thinking",
        ),
        pytest.param(
            [{"role": "system", "content": "Be"}, {"role": "system", "content": [text("brief.")]}, ASKED],
            [{"role": "system", "content": "Be\nbrief."}, ASKED],
            id="leading system messages are one",
        ),
        pytest.param(
            [ASKED, {"role": "system", "content": [text("a"), text("b")]}, ASKED],
            [ASKED, {"role": "system", "content": "a\nb"}, ASKED],
            id="a later system message keeps its place",
        ),
        pytest.param([ASKED, {"role": "assistant", "content": ""}], [ASKED], id="an empty last answer is none"),
    ],
)  # fmt: skip
def test_messages(given, expected):
    assert chat(given)["messages"] == expected


@pytest.mark.parametrize(
    "system, expected",
    [
        ("Be brief.", "Be brief."),
        ([text("Be"), text("brief.") | {"cache_control": {"type": "ephemeral"}}], "Be\nbrief."),
        ([text("x-anthropic-billing-header: cch=8f3;"), text("Be brief.")], "Be brief."),
        ("", None),
        ([], None),
    ],
)
def test_a_system_prompt_is_the_first_message(system, expected):
    first = [] if expected is None else [{"role": "system", "content": expected}]
    assert chat([ASKED], system=system)["messages"] == [*first, ASKED]


def test_a_last_answer_is_continued():
    found = chat([ASKED, {"role": "assistant", "content": "It is"}])
    assert found["continue_final_message"] is True and found["add_generation_prompt"] is False
    assert "continue_final_message" not in chat([ASKED])


def test_parameters_have_their_names():
    found = chat(
        [ASKED], model="m", stream=True, temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["a"], seed=3, min_p=0.1,
        metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, stop=None, n=1,
    )  # fmt: skip
    expected = {
        "model": "m", "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["a"], "seed": 3,
        "min_p": 0.1, "max_tokens": 9,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_tools_are_functions():
    found = chat([ASKED], tools=[WEATHER, {"type": "custom", "name": "now", "input_schema": {}, "strict": True}])
    assert found["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}, "strict": True}},
    ]
    assert "tools" not in chat([ASKED], tools=[])


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "now", "disable_parallel_tool_use": False},
            {"tool_choice": {"type": "function", "function": {"name": "now"}}, "parallel_tool_calls": True},
        ),
    ],
)
def test_choices_of_tools(choice, expected):
    found = chat([ASKED], tools=[WEATHER], tool_choice=choice)
    assert {name: found[name] for name in ("tool_choice", "parallel_tool_calls") if name in found} == expected


@pytest.mark.parametrize(
    "given, kwargs, shown",
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}, False),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, False),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            {"enable_thinking": True, "a": 1},
            False,
        ),
        ({}, None, None),
    ],
)
def test_thinking(given, kwargs, shown):
    found = chat([ASKED], **given)
    assert found.get("chat_template_kwargs") == kwargs and found.get("include_reasoning") == shown


def test_a_schema_is_a_format_of_the_answer():
    config = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    found = chat([ASKED], output_config=config)["response_format"]
    assert found["type"] == "json_schema" and found["json_schema"]["schema"] == SCHEMA
    assert "response_format" not in chat([ASKED], output_config={"effort": "high"})


def test_counting_takes_the_same_conversation():
    given = {"messages": [ASKED], "system": "s", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    counted = chat_request_of(validated(CountTokensRequest, given)).model_dump(exclude_none=True)
    asked = chat(**given)
    assert counted == {name: value for name, value in asked.items() if name != "max_tokens"}


@pytest.mark.parametrize(
    "more, param, says",
    [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [text("a"), IMAGE]}]}, "messages.0.content.1", "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
        (
            {"messages": [{"role": "user", "content": [result("a", [IMAGE])]}]},
            "messages.0.content.0.content.0", "image",
        ),
        ({"messages": [{"role": "user", "content": [use("now", "a")]}]}, "messages.0.content.0", "tool_use"),
        ({"messages": [{"role": "assistant", "content": [result("a")]}]}, "messages.0.content.0", "tool_result"),
        ({"messages": [ASKED, {"role": "system", "content": [IMAGE]}]}, "messages.1.content.0", "image"),
        ({"system": [IMAGE]}, "system.0", "image"),
        ({"messages": [{"role": "assistant", "content": [use("now", "a")]}]}, "messages", "results are missing"),
        ({"messages": [{"role": "assistant", "content": "\n"}]}, "messages", "no text to continue"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "web_search_20250305"),
        ({"tools": [{"name": "now"}]}, "tools.0.input_schema", "required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name", "pattern"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type", "object"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "needed"),
        ({"thinking": {"type": "always"}}, "thinking.type", "adaptive"),
        ({"stop_sequences": list("abcde")}, "stop_sequences", "at most 4"),
        ({"stop": "a"}, "stop", "stop_sequences"),
        ({"n": 2}, "n", "one answer"),
        ({"logprobs": True}, "logprobs", "no log probabilities"),
        ({"branches": ["a"]}, "branches", "one answer"),
        ({"response_format": {"type": "json_object"}}, "response_format", "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not called"),
        ({"seed": "x"}, "seed", "valid integer"),
        ({"chat_template_kwargs": 3, "thinking": {"type": "disabled"}}, "chat_template_kwargs", "dictionary"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(more, param, says):
    with pytest.raises(ApiError, match=says) as found:
        chat(**{"messages": [ASKED], **more})
    assert found.value.status == 400 and found.value.param == param


def test_max_tokens_is_required():
    with pytest.raises(ApiError, match="max_tokens: Field required"):
        validated(MessagesRequest, {"messages": [ASKED]})

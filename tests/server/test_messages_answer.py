"""Messages of Anthropic's API from outputs of the engine: events and whole answers of any text, cut in any way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.server.errors import ApiError
from jaxinfer.server.messages_answer import MessageAnswer, MessageForm
from jaxinfer.server.parse.formats import FORMATS
from jaxinfer.server.parse.machine import Parser
from tests.server.test_parse import TOOLS, cut_texts

NUM_PROMPT, MOST = 20, 100


def form(name: str | None = "hermes", *, is_thinking: bool = False, **more: Any) -> MessageForm:
    def parser() -> Parser:
        return Parser(FORMATS[name or ""], TOOLS, is_thinking=is_thinking)

    return MessageForm(NUM_PROMPT, more.pop("max_tokens", 50), MOST, parser=parser if name else None, **more)


def outputs(*parts: str, reason: str = "stop", stop: int | str | None = None, num_cached: int = 0) -> list[Any]:
    """Outputs of one answer, each with a part of its text and one token."""
    last = len(parts) - 1
    return [
        RequestOutput(
            "0", None, list(range(NUM_PROMPT)),
            [CompletionOutput(0, part, [7], finish_reason=reason if i == last else None, stop_reason=stop)],
            finished=i == last, num_cached_tokens=num_cached,
        )
        for i, part in enumerate(parts)
    ]  # fmt: skip


def answered(asked: MessageForm, found: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events and the whole of one answer."""
    answer = MessageAnswer("id", "tiny", asked)
    events = list(answer.begin())
    for output in found:
        events += answer.add(0, output)
    events += answer.end()
    assert answer.closing() == b""
    return events, answer.whole()


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make; it checks that they come in the order that clients need."""
    first, *middle, delta, last = events
    assert first["type"] == "message_start" and delta["type"] == "message_delta" and last == {"type": "message_stop"}
    message = json.loads(json.dumps(first["message"]))
    assert message["type"] == "message" and message["role"] == "assistant" and message["content"] == []
    assert message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    blocks, is_open, is_signed, arguments = message["content"], False, False, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open, is_signed, arguments = True, False, ""
            continue
        assert is_open and event["index"] == len(blocks) - 1
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            assert is_signed == (block["type"] == "thinking")
            if block["type"] == "tool_use":
                block["input"] = arguments
            is_open = False
            continue
        assert event["type"] == "content_block_delta" and not is_signed
        match event["delta"]:
            case {"type": "text_delta", "text": text} if text and block["type"] == "text":
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text} if text and block["type"] == "thinking":
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text} if block["type"] == "thinking":
                block["signature"], is_signed = text, True
            case {"type": "input_json_delta", "partial_json": text} if text and block["type"] == "tool_use":
                arguments += text
            case other:
                raise AssertionError(other)
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def with_arguments(message: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """A whole message with the texts of its calls' arguments."""
    rest = iter(texts)
    blocks = [block | {"input": next(rest)} if block["type"] == "tool_use" else block for block in message["content"]]
    return message | {"content": blocks}


def is_same(text: str, value: dict[str, Any]) -> bool:
    """Whether a text of arguments is this value, unless it is no JSON."""
    try:
        return json.loads(text) == value
    except ValueError:
        return True


@pytest.mark.parametrize("name", FORMATS)
@given(
    parts=cut_texts(),
    is_thinking=st.booleans(),
    with_thinking=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
)
@settings(max_examples=200)
def test_events_are_the_whole_answer_in_any_pieces(name, parts, is_thinking, with_thinking, reason):
    asked = form(name, is_thinking=is_thinking, with_thinking=with_thinking)
    events, whole = answered(asked, outputs(*parts, reason=reason))
    streamed = accumulated(events)
    texts = [block["input"] for block in streamed["content"] if block["type"] == "tool_use"]
    assert streamed == with_arguments(whole, texts)
    assert whole["content"] and json.dumps(whole, allow_nan=False)
    inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    assert all(is_same(text, value) for text, value in zip(texts, inputs, strict=True))
    assert with_thinking or all(block["type"] != "thinking" for block in whole["content"])
    _, alone = answered(asked, outputs("".join(parts), reason=reason))
    assert alone["content"] == whole["content"] and alone["stop_reason"] == whole["stop_reason"]


def test_kinds_of_blocks_come_in_the_order_of_the_text():
    text = 'Hm.</think>So. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> Then.'
    events, whole = answered(form(is_thinking=True), outputs(*text))
    (name,) = (block["id"] for block in whole["content"] if block["type"] == "tool_use")
    assert re.fullmatch("toolu_[a-z0-9]{24}_0", name)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "So. "},
        {"type": "tool_use", "id": name, "name": "add", "input": {"a": 1}},
        {"type": "text", "text": "Then."},
    ]
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert started == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": name, "name": "add", "input": {}},
        {"type": "text", "text": ""},
    ]
    assert whole["id"] == "msg_id" and whole["model"] == "tiny" and whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize("asked", [form(), form(None), form(is_thinking=True, with_thinking=False)])
def test_an_answer_without_text_has_an_empty_one(asked):
    events, whole = answered(asked, outputs(""))
    assert whole["content"] == [{"type": "text", "text": ""}]
    assert [event["type"] for event in events][1:3] == ["content_block_start", "content_block_stop"]
    assert accumulated(events)["content"] == whole["content"]


CALL = '<tool_call>{"name": "add", "arguments": '


@pytest.mark.parametrize(
    "text, expected",
    [
        (f'{CALL}{{"a": 1, "b": 2}}}}</tool_call>', {"a": 1, "b": 2}),
        ('<tool_call>{"name": "now"}</tool_call>', {}),
        (f'{CALL}{{"a": 1, "b": "cu', {"a": 1}),
        (f'{CALL}{{"a": tru', {}),
        (f'{CALL}{{"a": 12 34}}}}</tool_call>', {"INVALID_JSON": '{"a": 12 34}'}),
        (f'{CALL}{{"a": NaN}}}}</tool_call>', {"INVALID_JSON": '{"a": NaN}'}),
        (f'{CALL}{{"a": 1e999}}}}</tool_call>', {"INVALID_JSON": '{"a": 1e999}'}),
        (f'{CALL}{{"a": "\\ud800"}}}}</tool_call>', {"INVALID_JSON": '{"a": "\\ud800"}'}),
    ],
)
def test_arguments_are_objects(text, expected):
    """Arguments that were cut are given as far as they are there, and those that are no JSON as their text."""
    events, whole = answered(form(), outputs(*text, reason="length"))
    (block,) = whole["content"]
    assert block["input"] == expected and whole["stop_reason"] == "max_tokens"
    (streamed,) = accumulated(events)["content"]
    written = text.partition('"arguments": ')[2].removesuffix("}</tool_call>")
    assert streamed["input"] == ("{}" if "now" in text else written)


@pytest.mark.parametrize(
    "text, reason, stop, num_tokens, expected",
    [
        ("a", "stop", None, 1, ("end_turn", None)),
        ("a", "stop", 7, 1, ("end_turn", None)),
        ("a", "stop", "END", 1, ("stop_sequence", "END")),
        (f'{CALL}{{}}}}</tool_call>', "stop", None, 1, ("tool_use", None)),
        (f'{CALL}{{"a": ', "stop", "END", 1, ("stop_sequence", "END")),
        (f'{CALL}{{}}}}</tool_call>', "length", None, 50, ("max_tokens", None)),
        ("a", "length", None, 50, ("max_tokens", None)),
        ("a", "length", None, 12, ("max_tokens", None)),
        ("a", "length", None, MOST - NUM_PROMPT, ("max_tokens", None)),
    ],
)  # fmt: skip
def test_reasons_of_the_end(text, reason, stop, num_tokens, expected):
    (output,) = outputs(text, reason=reason, stop=stop)
    output.outputs[0].token_ids = [7] * num_tokens
    events, whole = answered(form(), [output])
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert accumulated(events)["stop_reason"] == expected[0] and whole["usage"]["output_tokens"] == num_tokens


def test_an_answer_that_fills_the_context_says_so():
    (output,) = outputs("a", reason="length")
    output.outputs[0].token_ids = [7] * (MOST - NUM_PROMPT)
    assert answered(form(max_tokens=500), [output])[1]["stop_reason"] == "model_context_window_exceeded"
    assert answered(form(max_tokens=MOST - NUM_PROMPT), [output])[1]["stop_reason"] == "max_tokens"


def test_cached_tokens_are_counted_apart_once_they_are_known():
    events, whole = answered(form(), outputs("a", "b", num_cached=16))
    none = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert events[0]["message"]["usage"] == {"input_tokens": NUM_PROMPT, "output_tokens": 0, **none}
    final = {"input_tokens": 4, "output_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16}
    assert events[-2]["usage"] == whole["usage"] == final


def test_events_have_names():
    answer = MessageAnswer("id", "tiny", form())
    name, data, *rest = answer.encoded(answer.begin()).decode().split("\n")
    assert name == "event: message_start" and rest == ["", ""]
    assert json.loads(data.removeprefix("data: "))["type"] == "message_start"


def test_a_failure_is_an_event():
    answer = MessageAnswer("id", "tiny", form())
    text = answer.encoded(answer.failed(ApiError(503, "the request was aborted"))).decode()
    error = {"type": "overloaded_error", "message": "the request was aborted"}
    assert text.startswith("event: error\ndata: ")
    assert json.loads(text.partition("data: ")[2]) == {"type": "error", "error": error, "request_id": "id"}


def test_space_alone_is_no_block():
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    _, whole = answered(form(), outputs("\n", call))
    assert [block["type"] for block in whole["content"]] == ["tool_use"]
    _, whole = answered(form(is_thinking=True), outputs("\n\n</think>", " So."))
    assert whole["content"] == [{"type": "text", "text": "So."}]
    events, whole = answered(form(), outputs(" ", "\n"))
    assert whole["content"] == [{"type": "text", "text": " \n"}]
    assert [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"] == [" \n"]


@pytest.mark.parametrize("stop, reason", [(None, "max_tokens"), ("unit", "stop_sequence")])
def test_a_call_that_is_cut_is_none_to_be_made(stop, reason):
    _, whole = answered(form(), outputs('<tool_call>{"name": "add", "arguments": {"a": 1', stop=stop))
    assert whole["stop_reason"] == reason

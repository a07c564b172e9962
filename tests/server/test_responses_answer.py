"""Answers of responses: events that OpenAI's own accumulator takes, equal to the whole in any pieces, and to chat."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxinfer.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.chat_answer import ChatAnswer, ChatForm
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError
from jaxinfer.server.parse.formats import FORMATS
from jaxinfer.server.parse.machine import Parser
from jaxinfer.server.protocol.responses import ResponseObject, ResponsesRequest
from jaxinfer.server.responses import BackgroundResponse
from jaxinfer.server.responses_answer import ResponseAnswer, ResponseForm
from jaxinfer.server.responses_request import echo_of
from jaxinfer.server.running import Running
from jaxinfer.server.service import Service
from jaxinfer.server.settings import ServerSettings
from jaxinfer.server.token_texts import TokenTexts
from jaxinfer.tokenizer import Tokenizer
from tests.server.talking import TINY
from tests.server.test_parse import TOOLS, texts

TOKENIZER = Tokenizer(TINY)
ECHO = {"model": "tiny", "store": True, **echo_of(ResponsesRequest(), SamplingParams())}
EVENT: Any = TypeAdapter(ResponseStreamEvent)
KINDS = ("plain", "thinking", "calling")


def parser_of(kind: str) -> Parser | None:
    if kind == "plain":
        return None
    return Parser(FORMATS["hermes"], {} if kind == "thinking" else TOOLS, is_thinking=kind == "thinking")


def outputs_of(text: str, cuts: set[int], lag: int, reason: str) -> list[RequestOutput]:
    """A text as outputs of the engine.

    Args:
        cuts: before which of its tokens a new output begins.
        lag: characters that each output but the last holds back.
    """
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    ends = [TOKENIZER.fast.token_to_id("<|end|>")] if reason == "stop" else []
    stream = TOKENIZER.stream([], skip_special_tokens=False)
    lengths = [0]
    for token in tokens:
        lengths.append(lengths[-1] + len(stream.append(token)))
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(tokens)), len(tokens)]
    found, shown = [], 0
    for begin, end in zip(places, places[1:], strict=False):
        is_last = end == len(tokens)
        upto = len(text) if is_last else max(shown, lengths[end] - lag)
        new = tokens[begin:end] + (ends if is_last else [])
        part = CompletionOutput(
            0, text[shown:upto], new, logprobs=[{token: Logprob(-0.5, 1)} for token in new],
            finish_reason=reason if is_last else None,
        )  # fmt: skip
        found.append(RequestOutput("r", None, [1, 2, 3], [part], finished=is_last))
        shown = upto
    return found


@st.composite
def cut_outputs(draw: Any) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """A text in pieces, and the same in one."""
    text, reason = draw(texts), draw(st.sampled_from(["stop", "length"]))
    pieces = outputs_of(text, draw(st.sets(st.integers(1, 60), max_size=8)), draw(st.integers(0, 3)), reason)
    return pieces, outputs_of(text, set(), 0, reason)


def answer_of(kind: str, top_logprobs: int | None = None, ended: Any = lambda response: None) -> ResponseAnswer:
    form = ResponseForm(ECHO, top_logprobs, parser_of(kind))
    return ResponseAnswer("n", Envelope("n", "tiny", "f"), form, TokenTexts(TOKENIZER), ended)


def events_of(answer: ResponseAnswer, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    found = list(answer.begin())
    for output in outputs:
        found += answer.add(0, output)
    return json.loads(json.dumps(found + list(answer.end())))


def whole_of(answer: Any, outputs: list[RequestOutput]) -> dict[str, Any]:
    for output in outputs:
        answer.add(0, output)
    return answer.whole()


def accumulated(events: list[dict[str, Any]]) -> Response | None:
    """What OpenAI's client makes of events; it raises on an order that it does not know."""
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=event))
    return state._completed_response


def final_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of the last event, once all events were checked: their numbers, their order and what they add to."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    first, second, *rest, last = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"]["output"] == [] and first["response"]["usage"] is None
    final = last["response"]
    assert last["type"] == f"response.{final['status']}"
    output, is_open, joined, logprobs = final["output"], False, "", []
    ended: list[dict[str, Any]] = []
    for event in rest:
        name = event["type"].removeprefix("response.")
        assert event["output_index"] == len(ended)
        item = output[len(ended)]
        if name == "output_item.added":
            assert not is_open and event["item"]["id"] == item["id"] and event["item"]["status"] == "in_progress"
            assert event["item"].get("content", []) == []
            is_open, joined, logprobs = True, "", []
            continue
        assert is_open and event.get("item_id", item["id"]) == item["id"]
        if name.endswith(".delta"):
            joined += event["delta"]
            logprobs += event.get("logprobs", [])
        elif name == "output_item.done":
            assert event["item"] == item
            is_open = False
            ended.append(item)
        elif name.endswith(".done"):
            part = event.get("part", event)
            assert part.get("text", part.get("arguments")) == joined
            assert part.get("logprobs", []) == logprobs
    assert not is_open and ended == output
    return final


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name not in ("created_at", "completed_at")}


@pytest.mark.parametrize("kind", KINDS)
@given(outputs=cut_outputs(), with_logprobs=st.booleans())
@settings(max_examples=100)
def test_a_stream_in_any_pieces_adds_to_the_whole_answer(kind, outputs, with_logprobs):
    pieces, one = outputs
    top = 0 if with_logprobs and kind != "calling" else None
    events = events_of(answer_of(kind, top), pieces)
    final = final_of(events)
    assert without_times(final) == without_times(whole_of(answer_of(kind, top), one))
    Response.model_validate(final)
    ResponseObject.model_validate(final)
    found = accumulated(events)
    assert (found is not None) == (final["status"] == "completed")
    if found is not None:
        assert [item.id for item in found.output] == [item["id"] for item in final["output"]]


@pytest.mark.parametrize("kind", KINDS)
@given(outputs=cut_outputs())
@settings(max_examples=100)
def test_a_response_says_what_chat_says(kind, outputs):
    pieces, one = outputs
    found = whole_of(answer_of(kind), pieces)
    form = ChatForm(1, None, with_token_ids=False, parser=(lambda: parser_of(kind)) if kind != "plain" else None)
    answer = ChatAnswer(Envelope("chatcmpl-n", "tiny", "f"), None, form, TokenTexts(TOKENIZER))
    chat = whole_of(answer, one)
    message = chat["choices"][0]["message"]
    texts = {"message": "", "reasoning": "", "function_call": ""}
    for item in found["output"]:
        texts[item["type"]] += "".join(part["text"] for part in item.get("content", ()))
    calls = [item for item in found["output"] if item["type"] == "function_call"]
    content = message["content"] or ""
    assert texts["message"] == content if not calls else texts["message"].split() == content.split()
    assert texts["reasoning"] == message.get("reasoning", "")
    expected = [call["function"] for call in message.get("tool_calls", ())]
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == expected
    assert len({call["call_id"] for call in calls}) == len(calls)
    usage = {
        "prompt_tokens": found["usage"]["input_tokens"], "completion_tokens": found["usage"]["output_tokens"],
        "total_tokens": found["usage"]["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": found["usage"]["input_tokens_details"]["cached_tokens"]},
        "completion_tokens_details": found["usage"]["output_tokens_details"],
    }  # fmt: skip
    assert usage == chat["usage"]


@pytest.mark.parametrize(
    "kind, text, types",
    [
        ("plain", "It is.", ["message"]),
        ("plain", "", ["message"]),
        ("plain", " \n", ["message"]),
        ("thinking", "So.</think>It is.", ["reasoning", "message"]),
        ("thinking", "So.</think>", ["reasoning", "message"]),
        ("calling", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', ["function_call"]),
        ("calling", '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>', ["function_call"]),
        ("calling", 'Now <tool_call>{"name": "now"}</tool_call> and', ["message", "function_call", "message"]),
        ("calling", "\n<think>So.</think>\nIt is.", ["reasoning", "message"]),
    ],
)  # fmt: skip
def test_an_answer_becomes_items(kind, text, types):
    found = whole_of(answer_of(kind), outputs_of(text, {2, 4}, 0, "stop"))
    assert [item["type"] for item in found["output"]] == types
    assert all(item["status"] == "completed" for item in found["output"]) and found["status"] == "completed"


def test_space_before_a_call_is_no_message_and_in_none():
    found = whole_of(answer_of("calling"), outputs_of('\n<tool_call>{"name": "now"}</tool_call>ok', {2}, 0, "stop"))
    assert [item["type"] for item in found["output"]] == ["function_call", "message"]
    assert found["output"][1]["content"][0]["text"] == "ok"


def test_an_answer_that_is_cut_says_where():
    found = whole_of(
        answer_of("calling"), outputs_of('So <tool_call>{"name": "add", "arguments": {"a', {3}, 0, "length")
    )
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in found["output"]] == ["completed", "incomplete"]
    assert found["output"][1]["arguments"] == '{"a'
    found = whole_of(answer_of("thinking"), outputs_of("So it", set(), 0, "length"))
    assert [(item["type"], item["status"]) for item in found["output"]] == [("reasoning", "incomplete")]
    found = whole_of(answer_of("plain"), outputs_of("", set(), 0, "length"))
    assert [(item["type"], item["status"]) for item in found["output"]] == [("message", "incomplete")]


@pytest.mark.parametrize(
    "kind, text, reasoning",
    [
        ("plain", "It is.", ""), ("thinking", "So it must be.</think>It is.", "So it must be.</think>"),
        ("thinking", "</think>It is.", "</think>"), ("calling", "<think>So.</think>\nIt is.", "<think>So.</think>"),
        ("calling", "<think>So it is", "<think>So it is"), ("calling", "It is.", ""),
    ],
)  # fmt: skip
def test_reasoning_tokens_are_those_of_its_text(kind, text, reasoning):
    found = whole_of(answer_of(kind), outputs_of(text, {1, 3, 5}, 1, "length"))
    expected = len(TOKENIZER.encode(reasoning, add_special_tokens=False)) if reasoning else 0
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}


def test_log_probabilities_of_a_message_are_those_of_its_tokens():
    text = "So it must be.</think>It is."
    found = whole_of(answer_of("thinking", 0), outputs_of(text, {2, 6, 9}, 2, "stop"))
    (part,) = found["output"][1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == "It is.<|end|>"


def test_an_error_ends_the_open_item_and_the_response():
    stored: list[dict[str, Any]] = []
    answer = answer_of("plain", ended=stored.append)
    events = [*answer.begin(), *answer.add(0, outputs_of("It is so.", {2}, 0, "stop")[0])]
    assert stored == []
    events += answer.failed(ApiError(503, "the engine has failed"))
    final = final_of(json.loads(json.dumps(events)))
    assert final["status"] == "failed" and final["output"][0]["status"] == "incomplete"
    assert final["error"] == {"code": "server_error", "message": "the engine has failed"}
    assert [response["status"] for response in stored] == ["failed"] and answer.cancel() == stored[0]
    early = answer_of("plain")
    assert final_of([*early.begin(), *early.failed(ApiError(400, "no"))])["usage"] is None


def test_a_response_is_kept_before_its_end_is_told():
    stored: list[dict[str, Any]] = []
    answer = answer_of("plain", ended=stored.append)
    answer.begin()
    for output in outputs_of("It is so.", {2}, 0, "stop"):
        answer.add(0, output)
    assert stored == []
    (last,) = answer.end()
    assert stored == [last["response"]] == [answer.whole()]


def test_a_queued_response_is_in_progress_from_its_first_output_on():
    form = ResponseForm(ECHO, status="queued")
    answer = ResponseAnswer("n", Envelope("n", "tiny", "f"), form, TokenTexts(TOKENIZER), lambda response: None)
    assert answer.response()["status"] == "queued"
    answer.add(0, outputs_of("It is so.", {2}, 0, "stop")[0])
    now = answer.response()
    assert now["status"] == now["output"][0]["status"] == "in_progress" and now["output"][0]["content"][0]["text"]
    assert answer.cancel()["status"] == "cancelled"


def test_a_response_in_the_background_may_be_cancelled_before_it_runs():
    stored: list[dict[str, Any]] = []
    left: list[str] = []

    async def cancelled() -> dict[str, Any]:
        stack = AsyncExitStack()
        stack.callback(left.append, "the queue")
        service = Service(ServerSettings(), "tiny")
        return await BackgroundResponse(service, answer_of("plain", ended=stored.append), stack, Running()).cancel()

    assert asyncio.run(cancelled())["status"] == "cancelled" == stored[0]["status"] and left == ["the queue"]


def test_reasoning_that_is_not_wanted_is_left_out():
    form = ResponseForm(ECHO, None, parser_of("thinking"), with_reasoning=False)
    answer = ResponseAnswer("n", Envelope("n", "tiny", "f"), form, TokenTexts(TOKENIZER), lambda response: None)
    found = whole_of(answer, outputs_of("So.</think>It is.", {2}, 0, "stop"))
    assert [item["type"] for item in found["output"]] == ["message"]
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 1

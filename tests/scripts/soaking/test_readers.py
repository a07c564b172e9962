"""Readers of answers: whole and streamed ones are the same, and what is out of order is broken."""

import pytest

from soaking.answers import COMPLETIONS, CONVERSATIONS, MESSAGES, RESPONSES
from soaking.choices import BrokenAnswerError, Call, Choice
from tests.scripts.soaking.reading import (
    call_item,
    chunk,
    delta,
    message_events,
    numbered,
    read,
    read_whole,
    response,
    response_events,
    text_item,
)

NEW_CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}


def changed(events, number, **fields):
    """Events of which one has other fields."""
    return [each | fields if place == number else each for place, each in enumerate(events)]


def without(events, number):
    return events[:number] + events[number + 1 :]


def swapped(events, number):
    """Events of which one has changed places with the next one."""
    return [*events[:number], events[number + 1], events[number], *events[number + 2 :]]


def test_a_conversation_is_the_same_whole_and_streamed():
    more = {"index": 0, "function": {"arguments": "{}"}}
    streamed = read(
        CONVERSATIONS,
        [
            chunk(delta(role="assistant", content="")),
            chunk(delta(content="a", tokens=[5])),
            chunk(delta(tool_calls=[NEW_CALL])),
            chunk(delta(tool_calls=[more], tokens=[6], reason="stop")),
            chunk(usage={"completion_tokens": 2}),
            "[DONE]",
        ],
    )
    message = {"content": "a", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    whole = {"choices": [{"index": 0, "message": message, "token_ids": [5, 6], "finish_reason": "stop"}]}
    assert streamed.is_over
    assert streamed.answer == read_whole(CONVERSATIONS, whole) == {"0": Choice("a", [Call("f", "{}")], [5, 6], "stop")}


def test_a_stream_says_whether_it_is_within_a_call():
    assert read(CONVERSATIONS, [chunk(delta(tool_calls=[NEW_CALL]))]).is_in_call
    assert [read(MESSAGES, message_events()[:count]).is_in_call for count in (4, 6, 8, 9)] == [False, True, True, False]
    assert [read(RESPONSES, response_events()[:count]).is_in_call for count in (6, 11, 13)] == [False, True, False]


def test_points_of_a_skeleton_have_their_own_numbers():
    chunks = [chunk(delta(number, content=f"point {point}") | {"point": point}) for number, point in enumerate([2, 1])]
    answer = read(CONVERSATIONS, chunks).answer
    assert {key: choice.text for key, choice in answer.items()} == {"2": "point 2", "1": "point 1"}


def test_completions_have_text():
    texts = [{"index": 0, "text": "a", "finish_reason": None}, {"index": 0, "text": "b", "finish_reason": "stop"}]
    assert read(COMPLETIONS, map(chunk, texts)).answer == {"0": Choice("ab", finish_reason="stop")}


def test_a_message_is_the_same_whole_and_streamed():
    streamed = read(MESSAGES, message_events())
    content = [{"type": "text", "text": "I look."}, {"type": "tool_use", "name": "describe", "input": {"age": 3}}]
    ended = {"stop_reason": "tool_use", "stop_sequence": None}
    whole = read_whole(MESSAGES, {"type": "message", "role": "assistant", "content": content, **ended})
    assert streamed.is_over
    assert streamed.answer == {"0": Choice("I look.", [Call("describe", '{"age": 3}')], [], "tool_use")}
    assert whole == {"0": Choice("I look.", [Call("describe", '{"age": 3}', is_read=True)], [], "tool_use")}


def test_a_message_says_which_sequence_has_ended_it():
    delta_of_end = {"stop_reason": "stop_sequence", "stop_sequence": " the"}
    assert read(MESSAGES, changed(message_events(), 9, delta=delta_of_end)).answer["0"].finish_reason == (
        "stop_sequence  the"
    )


def test_a_response_is_the_same_whole_and_streamed():
    streamed = read(RESPONSES, response_events())
    whole = read_whole(RESPONSES, response("completed", text_item("ab", [5, 6]), call_item("{}")))
    assert streamed.is_over
    assert streamed.answer == whole == {"0": Choice("ab", [Call("now", "{}")], [5, 6], "completed")}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (["[DONE]", "[DONE]"], r"follows \[DONE\]"),
        ([chunk(delta(reason="stop")), chunk(delta(reason="stop"))], "ended twice"),
        ([chunk(delta(reason="stop")), chunk(delta(content="x"))], "continues after its end"),
        ([chunk(delta(tool_calls=[NEW_CALL])), chunk(delta(tool_calls=[NEW_CALL]))], "has one again"),
        ([chunk(delta(tool_calls=[NEW_CALL | {"index": 1}]))], "the tool call 1 comes after 0 calls"),
        ([chunk(delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]))], "has no name"),
    ],
)
def test_chunks_out_of_order_are_broken(events, says):
    with pytest.raises(BrokenAnswerError, match=says):
        read(CONVERSATIONS, events)


@pytest.mark.parametrize("number", range(10))
def test_an_event_of_a_message_that_is_missing_or_late_is_noticed(number):
    events = message_events()
    is_delta = events[number]["type"] == "content_block_delta"
    if not is_delta:  # how many there are of those is free: the text tells
        with pytest.raises(BrokenAnswerError):
            read(MESSAGES, without(events, number))
    if events[number]["type"] != events[number + 1]["type"]:
        with pytest.raises(BrokenAnswerError):
            read(MESSAGES, swapped(events, number))


@pytest.mark.parametrize(
    ("number", "fields", "says"),
    [
        (0, {"message": {"type": "message", "role": "user", "content": [], "stop_reason": None}}, "begins with"),
        (1, {"content_block": {"type": "text", "text": "x"}}, "a block begins with"),
        (2, {"index": 1}, "has the index 1 instead of 0"),
        (
            2,
            {"delta": {"type": "input_json_delta", "partial_json": ""}},
            "input_json_delta in a block of the type text",
        ),
        (5, {"index": 0}, "has the index 0 instead of 1"),
        (9, {"delta": {"stop_reason": "end_turn", "stop_sequence": "x"}}, "with the stop sequence 'x'"),
    ],
)
def test_events_of_a_message_that_do_not_fit_are_broken(number, fields, says):
    with pytest.raises(BrokenAnswerError, match=says):
        read(MESSAGES, changed(message_events(), number, **fields))


@pytest.mark.parametrize("number", range(13))
def test_an_event_of_a_response_that_is_missing_or_late_is_noticed(number):
    events = response_events()
    with pytest.raises(BrokenAnswerError, match=r"has the number"):
        read(RESPONSES, without(events, number))
    with pytest.raises(BrokenAnswerError, match=r"follows|, but .* has come"):
        read(RESPONSES, numbered(without(events, number)))
    if events[number]["type"] != events[number + 1]["type"]:
        with pytest.raises(BrokenAnswerError):
            read(RESPONSES, numbered(swapped(events, number)))


@pytest.mark.parametrize(
    ("number", "fields", "says"),
    [
        (1, {"response": response("in_progress") | {"id": "other"}}, "another id"),
        (4, {"output_index": 1}, "has the index 1 instead of 0"),
        (4, {"item_id": "other"}, "one of the item other"),
        (4, {"delta": "x"}, "output_text.done has 'ab', but 'xb' has come"),
        (11, {"arguments": "{} "}, r"function_call_arguments.done has '\{\} '"),
        (12, {"item": call_item("{}") | {"call_id": "other"}}, "has begun as another one"),
        (13, {"response": response("completed", text_item("ab", [5, 6]))}, "the response has the items"),
        (13, {"response": response("incomplete", text_item("ab", [5, 6]), call_item("{}"))}, "the status incomplete"),
    ],
)
def test_events_of_a_response_that_do_not_fit_are_broken(number, fields, says):
    with pytest.raises(BrokenAnswerError, match=says):
        read(RESPONSES, changed(response_events(), number, **fields))


def test_errors_have_codes_in_all_forms():
    error = {"message": "the request was aborted", "code": "aborted"}
    failed = {"type": "failed", "response": response("failed", error=error | {"code": "server_error"})}
    events = {
        CONVERSATIONS: [{"error": error}],
        MESSAGES: [{"type": "error", "error": {"type": "overloaded_error", "message": error["message"]}}],
        RESPONSES: numbered([failed]),
    }
    for path, each in events.items():
        with pytest.raises(BrokenAnswerError, match="was aborted") as broken:
            read(path, each)
        assert broken.value.code == "aborted"
    with pytest.raises(BrokenAnswerError, match="the response is failed: the request was aborted") as broken:
        read_whole(RESPONSES, response("failed", error=error | {"code": "server_error"}))
    assert broken.value.code == "aborted"


def test_what_is_no_message_or_no_item_is_broken():
    with pytest.raises(BrokenAnswerError, match="not a message with content"):
        read_whole(MESSAGES, {"type": "message", "role": "assistant", "content": []})
    with pytest.raises(BrokenAnswerError, match="an item of the type reasoning"):
        read_whole(RESPONSES, response("completed", {"type": "reasoning"}))

"""The comparison of answers in a soak: what is equal, what is a near tie, and what is neither."""

import json

import pytest

from soaking.answers import (
    COMPLETIONS,
    CONVERSATIONS,
    EQUAL,
    READERS,
    TIE,
    BrokenAnswerError,
    Choice,
    StreamedAnswer,
    compare,
    whole_answer,
)
from soaking.requests import KINDS, MOST_DISTINCT, distinct_requests

EXPECTED = {
    "0": {
        "text": "ab", "tokens": [5, 6], "finish_reasons": ["length"],
        "scores": [{"5": 2.0, "9": 1.5}, {"6": 3.0, "7": 2.9995, "8": 1.0}],
    }
}  # fmt: skip


def event(*choices, **more):
    return json.dumps({"choices": list(choices), **more})


def delta(index=0, reason=None, tokens=(), **fields):
    return {"index": index, "delta": fields, "finish_reason": reason, "token_ids": list(tokens)}


@pytest.mark.parametrize(
    ("tokens", "text", "reason", "says"),
    [
        ([5, 6], "ab", "length", EQUAL),
        ([5, 7], "a?", "length", TIE),
        ([5, 8], "a?", "length", "token 1 is 8 instead of 6, their scores differ by 2.0"),
        ([5, 4], "a?", "length", "token 1 is 4 instead of 6, their scores differ by None"),
        ([9, 6], "?b", "length", "token 0 is 9"),
        ([5], "a", "length", "1 tokens instead of 2"),
        ([5, 6, 7], "ab", "length", "3 tokens instead of 2"),
        ([5, 6], "ac", "length", "the text is 'ac' instead of 'ab'"),
        ([5, 6], "ab", "stop", "it has ended by 'stop' instead of ['length']"),
        ([5, 6], "ab", None, "it has ended by None"),
    ],
)
def test_answers_are_compared(tokens, text, reason, says):
    found = compare(EXPECTED, {"0": Choice(text, tokens=tokens, finish_reason=reason)})
    assert found == says if says in (EQUAL, TIE) else says in found


def test_a_missing_or_further_choice_is_a_difference():
    assert "choices [] instead of ['0']" in compare(EXPECTED, {})
    choice = Choice("ab", tokens=[5, 6], finish_reason="length")
    assert "choices ['0', '1'] instead of ['0']" in compare(EXPECTED, {"0": choice, "1": choice})


def test_texts_are_compared_where_tokens_are_not_known():
    expected = {"0": {"text": "ab", "tokens": None, "finish_reasons": ["stop"], "scores": []}}
    assert compare(expected, {"0": Choice("ab", finish_reason="stop")}) == EQUAL
    assert "the text is 'a'" in compare(expected, {"0": Choice("a", finish_reason="stop")})


def test_a_stream_is_read_as_the_whole_answer():
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    streamed = StreamedAnswer(CONVERSATIONS)
    streamed.add(event(delta(role="assistant", content="")))
    streamed.add(event(delta(content="a", tokens=[5])))
    streamed.add(event(delta(tool_calls=[call])))
    assert streamed.is_in_call and not streamed.is_over
    streamed.add(event(delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}], tokens=[6], reason="stop")))
    streamed.add(event(usage={"completion_tokens": 2}))
    streamed.add("[DONE]")
    message = {"content": "a", "tool_calls": [call | {"function": {"name": "f", "arguments": "{}"}}]}
    whole = {"choices": [{"index": 0, "message": message, "token_ids": [5, 6], "finish_reason": "stop"}]}
    assert streamed.answer == whole_answer(CONVERSATIONS, whole) == {"0": Choice("a", "{}", [5, 6], "stop")}


def test_points_of_a_skeleton_have_their_own_numbers():
    streamed = StreamedAnswer(CONVERSATIONS)
    for number, point in enumerate([None, 2, 1]):
        streamed.add(event(delta(number, content=f"point {point}") | {"point": point}))
    assert {key: choice.text for key, choice in streamed.answer.items()} == {
        "None": "point None", "2": "point 2", "1": "point 1",
    }  # fmt: skip


def test_completions_have_text():
    streamed = StreamedAnswer(COMPLETIONS)
    streamed.add(event({"index": 0, "text": "a", "finish_reason": None}))
    streamed.add(event({"index": 0, "text": "b", "finish_reason": "stop"}))
    assert streamed.answer == {"0": Choice("ab", finish_reason="stop")}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([json.dumps({"error": {"message": "no more", "code": "aborted"}})], "no more"),
        (["[DONE]", "[DONE]"], r"follows \[DONE\]"),
        ([event(delta(reason="stop")), event(delta(reason="stop"))], "ended twice"),
        ([event(delta(reason="stop")), event(delta(content="x"))], "continues after its end"),
    ],
)
def test_what_is_no_stream_is_broken(events, says):
    streamed = StreamedAnswer(CONVERSATIONS)
    with pytest.raises(BrokenAnswerError, match=says) as broken:
        for each in events:
            streamed.add(each)
    assert broken.value.code == ("aborted" if "no more" in says else None)


def test_requests_are_of_all_kinds_and_the_same_again():
    requests = distinct_requests(MOST_DISTINCT, 3)
    assert {request.kind for request in requests} == {kind.name for kind in KINDS}
    assert [request.number for request in requests] == list(range(MOST_DISTINCT))
    assert len({json.dumps(request.asked.body) for request in requests}) > 0.9 * MOST_DISTINCT
    assert requests == distinct_requests(MOST_DISTINCT, 3) and requests != distinct_requests(MOST_DISTINCT, 4)
    assert all(request.asked.path in READERS for request in requests)
    for count in (len(KINDS) - 1, MOST_DISTINCT + 1):
        with pytest.raises(ValueError, match="the number of distinct requests must be in"):
            distinct_requests(count, 0)

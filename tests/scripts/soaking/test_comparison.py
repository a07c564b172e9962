"""The comparison of answers in a soak: what is equal, what is a near tie, and what is neither."""

import pytest

from soaking.choices import Call, Choice
from soaking.comparison import EQUAL, TIE, compare

EXPECTED = {
    "0": {
        "text": "ab", "tokens": [5, 6], "finish_reasons": ["length"], "calls": [], "margins": [], "ends": [],
        "scores": [{"5": 2.0, "9": 1.5}, {"6": 3.0, "7": 2.9995, "8": 1.0}],
    }
}  # fmt: skip
# The text is 'I look. <tool_call>{"name": "describe", "arguments": {"age": 3}}</tool_call>' in seven tokens.
CALLING = EXPECTED["0"] | {
    "text": "I look. ", "tokens": None, "scores": [], "finish_reasons": ["tool_use"],
    "calls": [
        {"name": "describe", "arguments": '{"age": 3}', "begin": 8, "arguments_begin": 53, "is_cut": False}
    ],
    "margins": [1.0, 0.0005, 1.0, 1.0, 1.0, 1.0, 1.0], "ends": [3, 8, 19, 53, 61, 63, 76],
}  # fmt: skip


def calling(text="I look. ", name="describe", arguments='{"age": 3}', reason="tool_use", *, is_read=False):
    return {"0": Choice(text, [Call(name, arguments, is_read)], finish_reason=reason)}


def near(number):
    """What is expected, with a near tie at one of its tokens alone."""
    return {"0": CALLING | {"margins": [0.0005 if place == number else 1.0 for place in range(7)]}}


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
def test_answers_with_tokens_are_compared(tokens, text, reason, says):
    found = compare(EXPECTED, {"0": Choice(text, tokens=tokens, finish_reason=reason)})
    assert found == says if says in (EQUAL, TIE) else says in found


def test_a_missing_or_further_choice_is_a_difference():
    assert "choices [] instead of ['0']" in compare(EXPECTED, {})
    choice = Choice("ab", tokens=[5, 6], finish_reason="length")
    assert "choices ['0', '1'] instead of ['0']" in compare(EXPECTED, {"0": choice, "1": choice})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (calling(), EQUAL),
        (calling(arguments='{"age":3}', is_read=True), EQUAL),
        (calling(arguments='{"age": 4}'), "the arguments of call 0 are '{\"age\": 4}' instead of '{\"age\": 3}'"),
        (calling(arguments='{"age":4}', is_read=True), "the arguments of call 0 are"),
        (calling(arguments='{"age":3}'), "the arguments of call 0 are"),
        (calling(name="now"), "call 0 is one of 'now' instead of 'describe'"),
        ({"0": Choice("I look. ", finish_reason="tool_use")}, "0 calls instead of 1"),
        ({"0": Choice("I look. ", calling()["0"].calls * 2, finish_reason="tool_use")}, "2 calls instead of 1"),
        (calling(reason="end_turn"), "it has ended by 'end_turn'"),
    ],
)
def test_calls_are_compared(answer, says):
    found = compare({"0": CALLING}, answer)
    assert found == says if says == EQUAL else says in found


def test_a_further_call_where_none_is_expected_is_a_difference():
    answer = {"0": Choice("ab", [Call("now", "{}")], [5, 6], "length")}
    assert "1 calls instead of 0" in compare(EXPECTED, answer)


def test_what_came_of_arguments_that_were_cut_is_compared_as_text_alone():
    cut = CALLING | {"calls": [CALLING["calls"][0] | {"arguments": '{"a', "is_cut": True}]}
    assert compare({"0": cut}, calling(arguments="{}", is_read=True)) == EQUAL
    assert "the arguments of call 0" in compare({"0": cut}, calling(arguments="{}"))


def test_arguments_that_are_no_json_are_compared_as_they_are_wrapped():
    wrong = {"0": CALLING | {"calls": [CALLING["calls"][0] | {"arguments": "{age: 3}"}]}}
    assert compare(wrong, calling(arguments='{"INVALID_JSON": "{age: 3}"}', is_read=True)) == EQUAL
    assert "the arguments" in compare(wrong, calling(arguments='{"INVALID_JSON": "{age: 4}"}', is_read=True))


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (calling("I see. "), 0),
        (calling("I loop. "), 1),
        ({"0": Choice("I look. No.", finish_reason="end_turn")}, 2),
        (calling(name="now", arguments="{}"), 2),
        (calling(arguments='{"day": 3}'), 4),
        (calling(arguments='{"age": 4}'), 5),
    ],
)
def test_without_tokens_the_first_difference_is_a_near_tie_where_two_tokens_were_nearly_equal(answer, number):
    verdicts = [compare(near(place), answer) for place in range(7)]
    assert [place for place, verdict in enumerate(verdicts) if verdict == TIE] == [number]

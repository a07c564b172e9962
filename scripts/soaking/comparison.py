"""How answers compare with what is expected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from soaking.choices import Answer, Call, Choice

NEAR_TIE = 1e-3
EQUAL, TIE = "equal", "near tie"


def compare(expected: Mapping[str, Any], answer: Answer) -> str:
    """Return EQUAL, TIE, or the difference between an answer and what is expected.

    Args:
        expected: of each choice `text` (None: not compared), `calls` (None: not compared), `finish_reasons` that are
            right, and `tokens` with `scores`: for each token, those of the best tokens in its place. Where the answer
            has no tokens, `tokens` is None, and `margins` and `ends` are those of the tokens that make up the text:
            how near the score of another one is, and the place in the text where each ends.
    """
    if expected.keys() != answer.keys():
        return f"choices {sorted(answer)} instead of {sorted(expected)}"
    verdict = EQUAL
    for key, right in expected.items():
        found = _compare_choice(right, answer[key])
        if found not in (EQUAL, TIE):
            return f"choice {key}: {found}"
        verdict = TIE if found == TIE else verdict
    return verdict


def _compare_choice(right: Mapping[str, Any], choice: Choice) -> str:
    if right["tokens"] is not None and choice.tokens != right["tokens"]:
        return _compare_tokens(right, choice.tokens)
    if right["text"] is not None and choice.text != right["text"]:
        if _is_tie(right, _place_in_answer(right, _first_difference(right["text"], choice.text))):
            return TIE
        return f"the text is {choice.text!r} instead of {right['text']!r}"
    if right["calls"] is not None:
        found = _compare_calls(right, choice.calls)
        if found != EQUAL:
            return found
    if choice.finish_reason not in right["finish_reasons"]:
        return f"it has ended by {choice.finish_reason!r} instead of {right['finish_reasons']}"
    return EQUAL


def _compare_tokens(right: Mapping[str, Any], found: Sequence[int]) -> str:
    tokens = right["tokens"]
    place = next((i for i, pair in enumerate(zip(tokens, found, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(found)} tokens instead of {len(tokens)}, the same as far as both have them"
    scores = right["scores"][place]
    both = scores.get(str(tokens[place])), scores.get(str(found[place]))
    margin = None if None in both else abs(both[0] - both[1])
    if margin is not None and margin < NEAR_TIE:
        return TIE
    return f"token {place} is {found[place]} instead of {tokens[place]}, their scores differ by {margin}"


def _compare_calls(right: Mapping[str, Any], calls: Sequence[Call]) -> str:
    for number, (wanted, call) in enumerate(zip(right["calls"], calls, strict=False)):
        if call.name != wanted["name"]:
            is_tie = _is_tie(right, wanted["begin"])
            return TIE if is_tie else f"call {number} is one of {call.name!r} instead of {wanted['name']!r}"
        if call.is_read and wanted["is_cut"]:
            continue  # an object of what was there of them
        if not _are_equal_arguments(call, wanted["arguments"]):
            place = wanted["arguments_begin"] + _first_difference(wanted["arguments"], call.arguments)
            if _is_tie(right, place) and not call.is_read:
                return TIE
            return f"the arguments of call {number} are {call.arguments!r} instead of {wanted['arguments']!r}"
    if len(calls) != len(right["calls"]):
        return f"{len(calls)} calls instead of {len(right['calls'])}"
    return EQUAL


def _are_equal_arguments(call: Call, wanted: str) -> bool:
    if not call.is_read:
        return call.arguments == wanted
    try:
        return json.loads(call.arguments) == json.loads(wanted)
    except ValueError:  # wrapped as Anthropic advises
        return json.loads(call.arguments) == {"INVALID_JSON": wanted}


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _place_in_answer(right: Mapping[str, Any], place: int) -> int | None:
    """The place in all that was generated, of one in the text without calls; None: it is after a call."""
    if not right["calls"]:
        return place
    begin = right["calls"][0]["begin"]
    return place if place <= begin else None


def _is_tie(right: Mapping[str, Any], place: int | None) -> bool:
    """Whether the token at a place in what was generated could have been another one; only where there are no tokens to
    compare."""
    if right["tokens"] is not None or place is None or not right["ends"]:
        return False
    number = next((i for i, end in enumerate(right["ends"]) if end > place), len(right["ends"]) - 1)
    return right["margins"][number] < NEAR_TIE

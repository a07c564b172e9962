"""Answers as clients read them, whole or from events, and how they compare with what is expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CONVERSATIONS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NEAR_TIE = 1e-3
EQUAL, TIE = "equal", "near tie"
DONE = "[DONE]"


class BrokenAnswerError(Exception):
    """What came is no answer of its endpoint, or ended with an error event.

    Attributes:
        code: of the error event; None: there was none.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Choice:
    """One choice of an answer as far as it has come."""

    text: str = ""
    arguments: str = ""  # of all tool calls
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


type Answer = dict[str, Choice]


def read_chat(answer: Answer, choices: Iterable[Mapping[str, Any]]) -> None:
    """Add choices of a whole conversation's answer, or of one of its chunks."""
    for given in choices:
        choice = _choice(answer, given)
        message = given.get("delta") or given.get("message") or {}
        choice.text += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            choice.arguments += call["function"].get("arguments") or ""


def read_completion(answer: Answer, choices: Iterable[Mapping[str, Any]]) -> None:
    """Add choices of a whole completion, or of one of its chunks."""
    for given in choices:
        _choice(answer, given).text += given["text"]


# By the path of the endpoint.
READERS: dict[str, Callable[[Answer, Iterable[Mapping[str, Any]]], None]] = {
    CONVERSATIONS: read_chat,
    COMPLETIONS: read_completion,
}


def _choice(answer: Answer, given: Mapping[str, Any]) -> Choice:
    """The choice that is continued: points of a skeleton have their numbers, whatever order they come in."""
    choice = answer.setdefault(str(given.get("point", given["index"])), Choice())
    choice.tokens += given.get("token_ids") or ()
    if given.get("finish_reason") is not None:
        if choice.finish_reason is not None:
            raise BrokenAnswerError("a choice has ended twice")
        choice.finish_reason = given["finish_reason"]
    elif choice.finish_reason is not None:
        raise BrokenAnswerError("a choice continues after its end")
    return choice


def whole_answer(path: str, body: Mapping[str, Any]) -> Answer:
    """Read a whole answer."""
    answer: Answer = {}
    READERS[path](answer, body["choices"])
    return answer


class StreamedAnswer:
    """An answer that comes in events.

    Attributes:
        is_over: whether the last event has come.
        is_in_call: whether the latest event was one of a tool call.
    """

    def __init__(self, path: str) -> None:
        self._read = READERS[path]
        self.answer: Answer = {}
        self.is_over = self.is_in_call = False

    def add(self, event: str) -> None:
        """Read an event.

        Raises:
            BrokenAnswerError: it is an error, or follows the last one.
        """
        if self.is_over:
            raise BrokenAnswerError("an event follows [DONE]")
        if event == DONE:
            self.is_over = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise BrokenAnswerError(chunk["error"]["message"], chunk["error"]["code"])
        self._read(self.answer, chunk["choices"])
        self.is_in_call = any((choice.get("delta") or {}).get("tool_calls") for choice in chunk["choices"])


def compare(expected: Mapping[str, Any], answer: Answer) -> str:
    """Return EQUAL, TIE, or the difference between an answer and what is expected.

    Args:
        expected: of each choice `text` (None: not compared), `tokens` (None: not compared), `finish_reasons` that are
            right, and `scores`: for each token, those of the best tokens in its place.
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
    tokens = right["tokens"]
    if tokens is not None and choice.tokens != tokens:
        place = next((i for i, pair in enumerate(zip(tokens, choice.tokens, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            return f"{len(choice.tokens)} tokens instead of {len(tokens)}, the same as far as both have them"
        scores = right["scores"][place]
        both = scores.get(str(tokens[place])), scores.get(str(choice.tokens[place]))
        margin = None if None in both else abs(both[0] - both[1])
        if margin is not None and margin < NEAR_TIE:
            return TIE
        return f"token {place} is {choice.tokens[place]} instead of {tokens[place]}, their scores differ by {margin}"
    if right["text"] is not None and choice.text != right["text"]:
        return f"the text is {choice.text!r} instead of {right['text']!r}"
    if choice.finish_reason not in right["finish_reasons"]:
        return f"it has ended by {choice.finish_reason!r} instead of {right['finish_reasons']}"
    return EQUAL

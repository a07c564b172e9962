"""Answers of OpenAI's conversations and completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from soaking.choices import Answer, BrokenAnswerError, Call, Choice, code_of

_DONE = "[DONE]"


class ChunkReader:
    """Reader of choices, of which each chunk has some; see `Reader`."""

    def __init__(self) -> None:
        self.answer: Answer = {}
        self.is_over = self.is_in_call = self.is_streamed = False

    def read_whole(self, body: Mapping[str, Any]) -> None:
        self._read(body["choices"])
        self.is_over = True

    def add(self, event: str) -> None:
        self.is_streamed = True
        if self.is_over:
            raise BrokenAnswerError("an event follows [DONE]")
        if event == _DONE:
            self.is_over = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise BrokenAnswerError(chunk["error"]["message"], code_of(chunk["error"]))
        self._read(chunk["choices"])
        self.is_in_call = any((choice.get("delta") or {}).get("tool_calls") for choice in chunk["choices"])

    def _read(self, choices: Iterable[Mapping[str, Any]]) -> None:
        for given in choices:
            choice = self._choice(given)
            if "text" in given:
                choice.text += given["text"]
                continue
            message = given.get("delta") or given.get("message") or {}
            choice.text += message.get("content") or ""
            is_whole = "message" in given
            for number, call in enumerate(message.get("tool_calls") or ()):
                _read_call(choice, number if is_whole else call["index"], call)

    def _choice(self, given: Mapping[str, Any]) -> Choice:
        """The choice that is continued: points of a skeleton have their numbers, whatever order they come in."""
        choice = self.answer.setdefault(str(given.get("point", given["index"])), Choice())
        choice.tokens += given.get("token_ids") or ()
        if given.get("finish_reason") is not None:
            if choice.finish_reason is not None:
                raise BrokenAnswerError("a choice has ended twice")
            choice.finish_reason = given["finish_reason"]
        elif choice.finish_reason is not None:
            raise BrokenAnswerError("a choice continues after its end")
        return choice


def _read_call(choice: Choice, number: int, given: Mapping[str, Any]) -> None:
    """Begin a call, or add to the latest one: ids and names come once, and one call ends before the next begins."""
    function, is_new = given["function"], number == len(choice.calls)
    if not (is_new or number == len(choice.calls) - 1):
        raise BrokenAnswerError(f"the tool call {number} comes after {len(choice.calls)} calls")
    if is_new != ("id" in given) or is_new != ("name" in function):
        raise BrokenAnswerError(f"the tool call {number} has no name, or has one again")
    if is_new:
        choice.calls.append(Call(function["name"]))
    choice.calls[-1].arguments += function.get("arguments") or ""

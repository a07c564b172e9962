"""Answers of OpenAI's responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from soaking.choices import Answer, BrokenAnswerError, Call, Choice, code_of

_ITEM, _END_OF_ITEM = "output_item.added", "output_item.done"
_PART, _END_OF_PART = "content_part.added", "content_part.done"
_TEXT, _END_OF_TEXT = "output_text.delta", "output_text.done"
_ARGUMENTS, _END_OF_ARGUMENTS = "function_call_arguments.delta", "function_call_arguments.done"
_ENDS = ("completed", "incomplete")
# Event without "response." -> the events that may follow it; None: the beginning. An answer has one item at least.
_NEXT: Mapping[str | None, tuple[str, ...]] = {
    None: ("created",),
    "created": ("in_progress",),
    "in_progress": (_ITEM,),
    _ITEM: (_PART, _ARGUMENTS, _END_OF_ARGUMENTS),
    _PART: (_TEXT, _END_OF_TEXT),
    _TEXT: (_TEXT, _END_OF_TEXT),
    _END_OF_TEXT: (_END_OF_PART,),
    _END_OF_PART: (_END_OF_ITEM,),
    _ARGUMENTS: (_ARGUMENTS, _END_OF_ARGUMENTS),
    _END_OF_ARGUMENTS: (_END_OF_ITEM,),
    _END_OF_ITEM: (_ITEM, *_ENDS),
} | {end: () for end in _ENDS}
# Kind of item -> the events that may follow its first one.
_FIRST = {"message": (_PART,), "function_call": (_ARGUMENTS, _END_OF_ARGUMENTS)}
_TOKEN = "token_id:"


class ResponseReader:
    """Reader of items, one after the other; see `Reader`.

    Tokens are those of log probabilities, if they were asked for as ids.

    Attributes:
        response_id: by which the response is found again.
    """

    def __init__(self) -> None:
        self._choice = Choice()
        self.answer: Answer = {"0": self._choice}
        self.is_over = self.is_in_call = self.is_streamed = False
        self.response_id = ""
        self._last: str | None = None
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # that have ended
        self._item: dict[str, Any] = {}  # the latest one, as it began
        self._text = ""  # of the latest item, or its arguments

    def read_whole(self, body: Mapping[str, Any]) -> None:
        self.response_id = body["id"]
        if body["status"] not in _ENDS:
            error = body["error"] or {}
            raise BrokenAnswerError(f"the response is {body['status']}: {error.get('message')}", code_of(error))
        for item in body["output"]:
            self._take(item)
        self._choice.finish_reason = body["status"]

    def _take(self, item: Mapping[str, Any]) -> None:
        """Add an item to the choice."""
        if item["type"] == "message":
            (part,) = item["content"]
            self._choice.text += part["text"]
            tokens = [entry["token"] for entry in part["logprobs"]]
            self._choice.tokens += [int(each.removeprefix(_TOKEN)) for each in tokens if each.startswith(_TOKEN)]
        elif item["type"] == "function_call":
            self._choice.calls.append(Call(item["name"], item["arguments"]))
        else:
            raise BrokenAnswerError(f"an item of the type {item['type']}")

    def add(self, event: str) -> None:
        self.is_streamed = True
        given = json.loads(event)
        if given["sequence_number"] != self._num_events:
            raise BrokenAnswerError(f"the event {self._num_events} has the number {given['sequence_number']}")
        self._num_events += 1
        kind = given["type"].removeprefix("response.")
        if kind == "failed":
            error = given["response"]["error"]
            raise BrokenAnswerError(error["message"], code_of(error))
        allowed = _NEXT[self._last] if self._last != _ITEM else _FIRST.get(self._item["type"], ())
        if kind not in allowed:
            raise BrokenAnswerError(f"{kind} follows {self._last}")
        self._last = kind
        if "response" in given:
            self._add_response(kind, given["response"])
        else:
            self._add_to_item(kind, given)
        self.is_in_call = kind == _ARGUMENTS

    def _add_response(self, kind: str, response: Mapping[str, Any]) -> None:
        if kind == "created":
            self.response_id = response["id"]
        if response["id"] != self.response_id:
            raise BrokenAnswerError("the response has another id than before")
        if response["output"] != self._items:
            raise BrokenAnswerError(f"the response has the items {response['output']} instead of {self._items}")
        status = kind if kind in _ENDS else "in_progress"
        if response["status"] != status:
            raise BrokenAnswerError(f"{kind} has the status {response['status']}")
        if kind in _ENDS:
            self._choice.finish_reason, self.is_over = kind, True

    def _add_to_item(self, kind: str, given: Mapping[str, Any]) -> None:
        if given["output_index"] != len(self._items):
            raise BrokenAnswerError(f"{kind} has the index {given['output_index']} instead of {len(self._items)}")
        if kind == _ITEM:
            self._item, self._text = given["item"], ""
            return
        item_id = given["item"]["id"] if kind == _END_OF_ITEM else given["item_id"]
        if item_id != self._item["id"]:
            raise BrokenAnswerError(f"{kind} is one of the item {item_id} instead of {self._item['id']}")
        match kind:
            case "output_text.delta" | "function_call_arguments.delta":
                self._text += given["delta"]
            case "output_text.done":
                self._check(kind, given["text"])
            case "function_call_arguments.done":
                self._check(kind, given["arguments"])
            case "content_part.done":
                self._check(kind, given["part"]["text"])
            case "output_item.done":
                self._end_item(given["item"])

    def _end_item(self, item: dict[str, Any]) -> None:
        self._check(_END_OF_ITEM, item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        names = ("type", "name", "call_id")
        if any(item.get(name) != self._item.get(name) for name in names):
            raise BrokenAnswerError(f"the item {item['id']} has begun as another one")
        self._items.append(item)
        self._take(item)

    def _check(self, kind: str, text: str) -> None:
        if text != self._text:
            raise BrokenAnswerError(f"{kind} has {text!r}, but {self._text!r} has come")

"""Answers of Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from soaking.choices import Answer, BrokenAnswerError, Call, Choice, code_of

# Event -> the events that may follow it; None: the beginning.
_NEXT: Mapping[str | None, tuple[str, ...]] = {
    None: ("message_start",),
    "message_start": ("content_block_start",),  # an answer has one block at least
    "content_block_start": ("content_block_delta", "content_block_stop"),
    "content_block_delta": ("content_block_delta", "content_block_stop"),
    "content_block_stop": ("content_block_start", "message_delta"),
    "message_delta": ("message_stop",),
    "message_stop": (),
}


class MessageReader:
    """Reader of blocks, one after the other; see `Reader`."""

    def __init__(self) -> None:
        self._choice = Choice()
        self.answer: Answer = {"0": self._choice}
        self.is_over = self.is_in_call = self.is_streamed = False
        self._last: str | None = None
        self._num_blocks = 0
        self._kind = ""  # of the latest block

    def read_whole(self, body: Mapping[str, Any]) -> None:
        if (body["type"], body["role"]) != ("message", "assistant") or not body["content"]:
            raise BrokenAnswerError(f"not a message with content: {json.dumps(body)[:200]}")
        for block in body["content"]:
            if block["type"] == "text":
                self._choice.text += block["text"]
            elif block["type"] == "tool_use":
                arguments = json.dumps(block["input"], ensure_ascii=False)
                self._choice.calls.append(Call(block["name"], arguments, is_read=True))
            else:
                raise BrokenAnswerError(f"a block of the type {block['type']}")
        self._end(body)

    def add(self, event: str) -> None:
        self.is_streamed = True
        given = json.loads(event)
        kind = given["type"]
        if kind == "error":
            raise BrokenAnswerError(given["error"]["message"], code_of(given["error"]))
        if kind not in _NEXT[self._last]:
            raise BrokenAnswerError(f"{kind} follows {self._last}")
        self._last = kind
        self.is_in_call = False
        match kind:
            case "message_start":
                message = given["message"]
                begun = message["type"], message["role"], message["content"], message["stop_reason"]
                if begun != ("message", "assistant", [], None):
                    raise BrokenAnswerError(f"a message begins with {begun}")
            case "content_block_start":
                self._begin(self._own(given, self._num_blocks)["content_block"])
                self._num_blocks += 1
            case "content_block_delta":
                self._add(self._own(given, self._num_blocks - 1)["delta"])
            case "content_block_stop":
                self._own(given, self._num_blocks - 1)
            case "message_delta":
                self._end(given["delta"])
            case _:
                self.is_over = True

    def _own(self, given: dict[str, Any], index: int) -> dict[str, Any]:
        if given["index"] != index:
            raise BrokenAnswerError(f"{given['type']} has the index {given['index']} instead of {index}")
        return given

    def _begin(self, block: Mapping[str, Any]) -> None:
        self._kind = block["type"]
        empty = {"text": ("text", ""), "tool_use": ("input", {})}
        if self._kind not in empty or block[empty[self._kind][0]] != empty[self._kind][1]:
            raise BrokenAnswerError(f"a block begins with {json.dumps(block)[:200]}")
        if self._kind == "tool_use":
            self._choice.calls.append(Call(block["name"]))
            self.is_in_call = True

    def _add(self, delta: Mapping[str, Any]) -> None:
        if (self._kind, delta["type"]) == ("text", "text_delta"):
            self._choice.text += delta["text"]
        elif (self._kind, delta["type"]) == ("tool_use", "input_json_delta"):
            self._choice.calls[-1].arguments += delta["partial_json"]
            self.is_in_call = True
        else:
            raise BrokenAnswerError(f"{delta['type']} in a block of the type {self._kind}")

    def _end(self, given: Mapping[str, Any]) -> None:
        """Take the reason of the end, with the sequence that has ended the answer if one has."""
        reason, sequence = given["stop_reason"], given["stop_sequence"]
        if (reason == "stop_sequence") != (sequence is not None):
            raise BrokenAnswerError(f"the stop reason {reason} with the stop sequence {sequence!r}")
        self._choice.finish_reason = reason if sequence is None else f"{reason} {sequence}"

"""The parser of gpt-oss's answers: messages, each with a channel, in its harmony format.

An answer continues the prompt's `<|start|>assistant`: a header up to `<|message|>`, a body up to `<|end|>`, `<|call|>`
or `<|return|>`, and further messages. Reasoning is in the channel "analysis", the answer in "final", and "commentary"
has calls of functions, and text that a model writes to people before it calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.server.parse.pieces import CallArguments, CallBegin, CallEnd, Piece, Text, Thought, joined

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
_ENDS = (END, CALL, RETURN, START)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
# Beginnings of a header: after `<|start|>assistant`, or with it.
_HEADERS = (CHANNEL, " to=", START, MESSAGE)

type _State = Callable[[str], None]


class HarmonyParser:
    """Parser of one answer. What it finds depends on the characters alone, never on how they were cut into pieces.

    A message to a function that there is not is content, and so is an answer without any marker.

    Args:
        tools: schemas of the tools' parameters, by their names.
        most_calls: further ones are left out; None: any number.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, most_calls: int | None = None) -> None:
        self._tools, self._most_calls = tools, most_calls
        self._found: list[Piece] = []
        self._header = self._hold = self._arguments = ""
        self._emit: Callable[[str], None] = self._say
        self._num_read = self._reasoning_end = self._num_calls = 0
        self._has_content = self._is_thought = self._is_call = False
        self._state: _State = self._at_start

    @property
    def reasoning_end(self) -> int:
        """Characters of the answer up to the end of its reasoning, with the markers; 0: it has had none yet."""
        return self._reasoning_end

    def feed(self, text: str) -> list[Piece]:
        """Read further text; returns what it brings."""
        for letter in text:
            self._num_read += 1
            self._state(letter)
        return self._take()

    def finish(self) -> list[Piece]:
        """End the answer; returns what was held back."""
        if self._state == self._in_body:
            if not any(marker.startswith(self._hold) for marker in _ENDS if self._hold):
                self._emit(self._hold)
            self._end_body()
        elif self._state == self._at_start:
            self._say(self._header)
        self._header = self._hold = ""
        self._state = self._after
        return self._take()

    def _take(self) -> list[Piece]:
        found, self._found = joined([piece for piece in self._found if getattr(piece, "text", "-")]), []
        return found

    def _at_start(self, letter: str) -> None:
        """Read what may be a header; an answer that begins otherwise is content."""
        self._header += letter
        if any(header.startswith(self._header) for header in _HEADERS):
            self._state = self._in_header if self._header in _HEADERS else self._at_start
            if self._header == MESSAGE:
                self._begin_body()
        else:
            text, self._header = self._header, ""
            self._emit, self._state = self._say, self._in_body
            for each in text:
                self._in_body(each)

    def _in_header(self, letter: str) -> None:
        self._header += letter
        if self._header.endswith(MESSAGE):
            self._begin_body()

    def _begin_body(self) -> None:
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        name = "" if recipient is None else recipient[1].removeprefix(FUNCTIONS)
        self._is_thought = channel is not None and channel[1] == "analysis"
        self._is_call = recipient is not None and name in self._tools
        self._emit, self._arguments = self._think if self._is_thought else self._say, ""
        if self._is_call:
            self._is_thought = False
            self._emit = self._argue if self._has_room else self._skip
            if self._has_room:
                self._found.append(CallBegin(self._num_calls, name))
                self._num_calls += 1
        elif not self._is_thought and self._has_content:
            self._found.append(Text("\n"))  # between text before calls and the answer
        self._header, self._hold, self._state = "", "", self._in_body

    @property
    def _has_room(self) -> bool:
        return self._most_calls is None or self._num_calls < self._most_calls

    def _in_body(self, letter: str) -> None:
        self._hold += letter
        while self._hold and not any(marker.startswith(self._hold) for marker in _ENDS):
            self._emit(self._hold[0])
            self._hold = self._hold[1:]
        if self._hold not in _ENDS:
            return
        marker, self._hold = self._hold, ""
        self._end_body()
        self._header = marker if marker == START else ""
        self._state = self._in_header if marker == START else self._after

    def _end_body(self) -> None:
        if self._is_thought:
            self._reasoning_end = self._num_read
        if self._is_call and self._emit == self._argue:
            is_cut = not _is_json(self._arguments)
            if not self._arguments.strip():
                self._found.append(CallArguments(self._num_calls - 1, "{}"))
                is_cut = False
            self._found.append(CallEnd(self._num_calls - 1, is_cut=is_cut))
        self._is_thought = self._is_call = False
        self._emit = self._skip

    def _after(self, letter: str) -> None:
        """Read what comes between messages, up to the next one's beginning."""
        self._header = (self._header + letter)[-len(START) :]
        if self._header == START:
            self._state = self._in_header

    def _say(self, text: str) -> None:
        self._has_content = self._has_content or bool(text)
        self._found.append(Text(text))

    def _think(self, text: str) -> None:
        self._found.append(Thought(text))

    def _argue(self, text: str) -> None:
        self._arguments += text
        self._found.append(CallArguments(self._num_calls - 1, text))

    def _skip(self, text: str) -> None:
        """Drop what is after a message, or a call that is one too many."""


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except ValueError:
        return False

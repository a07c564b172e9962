"""The parser of answers: a machine that reads one character after the other.

What it finds depends on the characters alone, never on how they were cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.server.parse.formats import THINK, CallFormat, ThinkTags
from jaxinfer.server.parse.json_call import JsonCall, MalformedError
from jaxinfer.server.parse.pieces import CallArguments, CallBegin, CallEnd, Piece, Text, Thought, joined
from jaxinfer.server.parse.xml_call import XmlCall

# Texts that were taken for calls, after which an answer has no calls: each is read again from its marker on.
_MOST_FALSE = 64

type _State = Callable[[str], None]


class Parser:
    """Parser of one answer.

    A call that turns out to be none, or to be one of no tool, is content as it is written.

    Args:
        calls: the format of tool calls; None: there are none.
        tools: schemas of the tools' parameters, by their names.
        think: tags of reasoning; None: there is none.
        is_thinking: whether the answer begins within reasoning.
        most_calls: further ones are left out; None: any number.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        think: ThinkTags | None = THINK,
        is_thinking: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._calls = calls if tools else None
        self._tools, self._think, self._most_calls = tools, think, most_calls
        self._found: list[Piece] = []
        self._hold = ""  # may become a marker
        self._raw = ""  # of a call that is not announced yet
        self._space = ""  # after a call
        self._again = deque[str]()  # characters to be read again
        self._num_false = 0
        self._is_open = False  # whether a pair of markers around calls is not closed yet
        self._skips_space = False
        self._is_first = True  # no character of content was read
        self._num_read = 0
        self._reasoning_end = 0
        self._num_calls = 0
        self._is_surplus = False  # the present call is one too many
        self._call: JsonCall | XmlCall | None = None
        self._state: _State = self._in_thought if is_thinking and think is not None else self._in_content
        bare = self._calls is not None and not self._calls.open and not is_thinking
        if bare:
            self._state = self._at_start

    @property
    def reasoning_end(self) -> int:
        """Characters of the answer up to the end of its reasoning, with the tags; 0: it has had none yet."""
        return self._reasoning_end

    def feed(self, text: str) -> list[Piece]:
        """Read further text; returns what it brings."""
        for letter in text:
            self._num_read += 1
            self._state(letter)
            while self._again:
                self._state(self._again.popleft())
        return self._take()

    def finish(self) -> list[Piece]:
        """End the answer; returns what was held back."""
        if self._call is not None and self._call.has_begun and not self._call.has_ended:
            if isinstance(self._call, XmlCall):
                self._call.cut()
            if not self._is_surplus:
                self._found.append(CallEnd(self._num_calls - 1, is_cut=True))
        elif self._raw:
            if not self._has_most:
                self._emit_text(self._raw + self._hold)
        elif self._state == self._in_thought:
            self._reasoning_end = self._num_read
            self._found.append(Thought(self._hold))
        elif not self._is_in_closing_marker:
            self._emit_text(self._hold)
        self._hold = self._raw = ""
        self._call, self._state = None, self._in_content
        return self._take()

    def _take(self) -> list[Piece]:
        found, self._found = joined([piece for piece in self._found if getattr(piece, "text", "-")]), []
        return found

    def _held(self, letter: str, markers: list[str], emit: Callable[[str], None]) -> str | None:
        """Read a character of text in which markers may begin; returns a marker that is complete."""
        self._hold += letter
        while self._hold and not any(marker.startswith(self._hold) for marker in markers):
            emit(self._hold[0])
            self._hold = self._hold[1:]
        if self._hold not in markers:
            return None
        found, self._hold = self._hold, ""
        return found

    def _emit_text(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if text:
            self._is_first = self._is_first and not text.strip()
            self._found.append(Text(text))

    # Reasoning

    def _in_thought(self, letter: str) -> None:
        assert self._think is not None
        markers = [self._think.close]
        if self._think.call_ends_it and self._calls is not None and self._calls.open:
            markers.append(self._calls.open)
        found = self._held(letter, markers, lambda text: self._found.append(Thought(text)))
        if found is not None:
            self._reasoning_end = self._num_read - (0 if found == self._think.close else len(found))
        if found == self._think.close:
            self._skips_space, self._state = True, self._in_content
            if self._calls is not None and not self._calls.open:
                self._state = self._at_start
        elif found is not None:
            self._open(found)

    # Content

    def _markers(self) -> list[str]:
        calls, markers = self._calls, []
        if calls is not None and self._may_call:
            markers = [marker for marker in (calls.open, calls.bare_open) if marker]
        if calls is not None and self._is_open and calls.close:
            markers.append(calls.close)
        if self._think is not None and self._is_first:
            markers.append(self._think.open)
        return markers

    def _in_content(self, letter: str) -> None:
        found = self._held(letter, self._markers(), self._emit_text)
        if found is None:
            return
        if self._think is not None and found == self._think.open:
            self._state = self._in_thought
        elif self._calls is not None and found == self._calls.close:
            self._close()
        else:
            self._open(found)

    def _close(self) -> None:
        """Read on as content after the marker that closes calls."""
        self._is_open, self._skips_space, self._state = False, True, self._in_content

    def _at_start(self, letter: str) -> None:
        """Read what may be a call without a marker: only an answer that begins with one is one."""
        assert self._calls is not None
        if not self._hold and letter.isspace():
            self._raw += letter
            return
        if self._hold or (self._calls.bare_open and self._calls.bare_open.startswith(letter)):
            self._hold += letter
            if self._hold == self._calls.bare_open:
                marker, self._hold = self._raw + self._hold, ""
                self._raw = ""
                self._open(marker)
            elif not self._calls.bare_open.startswith(self._hold):
                self._give_up(self._hold)
            return
        if letter == "{":
            before, self._raw = self._raw, ""
            self._open(before)
            self._state(letter)
        else:
            self._give_up(letter)

    def _give_up(self, text: str) -> None:
        """Read as content what was held back at the start."""
        text, self._raw, self._hold = self._raw + text, "", ""
        self._state = self._in_content_alone if self._calls and not self._calls.open else self._in_content
        self._again.extendleft(reversed(text))

    def _in_content_alone(self, letter: str) -> None:
        self._emit_text(letter)

    # Calls

    def _open(self, marker: str) -> None:
        assert self._calls is not None
        self._raw, self._is_open = marker, True
        if self._calls.body == "array":
            self._state = self._before_array
            return
        self._begin_call(has_opened=bool(self._calls.bare_open) and marker == self._calls.bare_open)

    def _before_array(self, letter: str) -> None:
        self._raw += letter
        if letter == "[":
            self._begin_call()
            self._state = self._in_array_start
        elif not letter.isspace():
            self._fail()

    def _in_array_start(self, letter: str) -> None:
        if letter == "]":  # no call at all
            self._raw, self._call, self._state = "", None, self._after_call
        elif letter.isspace():
            self._raw += letter
        else:
            self._state = self._in_call
            self._state(letter)

    def _begin_call(self, *, has_opened: bool = False) -> None:
        assert self._calls is not None
        if self._calls.body == "xml":
            self._call = XmlCall(self._tools, self._announce, self._argue, has_opened=has_opened)
        else:
            self._call = JsonCall(self._tools.__contains__, self._announce, self._argue)
        self._state = self._in_call

    def _announce(self, name: str) -> None:
        self._raw = ""
        self._is_surplus = self._has_most
        if not self._is_surplus:
            self._found.append(CallBegin(self._num_calls, name))
            self._num_calls += 1

    def _argue(self, text: str) -> None:
        if not self._is_surplus:
            self._found.append(CallArguments(self._num_calls - 1, text))

    def _in_call(self, letter: str) -> None:
        call = self._call
        assert call is not None
        if not call.has_begun:
            self._raw += letter
        try:
            call.feed(letter)
        except MalformedError:
            if call.has_begun:
                self._end_call(letter)
            else:
                self._fail()
            return
        if call.has_begun:
            self._raw = ""
        if call.has_ended:
            self._end_call(call.rest if isinstance(call, XmlCall) else "")

    def _end_call(self, rest: str) -> None:
        if not self._is_surplus:
            self._found.append(CallEnd(self._num_calls - 1))
        self._call, self._state, self._space = None, self._after_call, ""
        self._again.extendleft(reversed(rest))

    def _fail(self) -> None:
        """Read as content what was taken for a call: its marker, and then the rest, which may have another one."""
        assert self._calls is not None
        text, self._raw, self._call = self._raw, "", None
        self._num_false += 1
        opened = next((m for m in (self._calls.open, self._calls.bare_open) if m and text.startswith(m)), "")
        self._is_open = self._is_open and not opened
        self._emit_text(opened)
        if not self._calls.open:
            self._state = self._in_content_alone
        else:
            self._state = self._in_content
        self._again.extendleft(reversed(text[len(opened) :]))

    def _after_call(self, letter: str) -> None:
        """Read what comes after a call: the closing marker, another call, or content with the space before it."""
        calls = self._calls
        assert calls is not None
        if letter.isspace() and not self._hold:
            self._space += letter
            return
        more = calls.separator or ("," if calls.body == "array" else "")
        if not self._hold and self._is_open and letter == more and self._may_call:
            self._raw, self._space = self._space + letter, ""
            self._begin_call()
            return
        if not self._hold and calls.body == "array" and letter == "]" and self._is_open:
            self._state = self._after_array
            return
        self._follow(letter, [calls.close, *((calls.open, calls.bare_open) if self._may_call and calls.open else ())])

    def _after_array(self, letter: str) -> None:
        """Read what comes after the last call of an array: the closing marker, or content."""
        assert self._calls is not None
        if letter.isspace() and not self._hold:
            self._space += letter
        else:
            self._follow(letter, [self._calls.close])

    def _follow(self, letter: str, markers: list[str]) -> None:
        """Read a character of a marker that may follow a call; what is none is content."""
        assert self._calls is not None
        self._hold += letter
        if not any(marker.startswith(self._hold) for marker in markers):
            text, self._hold, self._space = self._space + self._hold, "", ""
            self._state = self._in_content if self._calls.open else self._in_content_alone
            self._again.extendleft(reversed(text))
        elif self._hold in markers:
            found, self._hold, self._space = self._hold, "", ""
            if found == self._calls.close:
                self._close()
            else:
                self._open(found)

    @property
    def _is_in_closing_marker(self) -> bool:
        """Whether what is held back begins the marker after a call, which is no content."""
        is_after_call = self._state in (self._after_call, self._after_array)
        return is_after_call and self._calls is not None and self._calls.close.startswith(self._hold)

    @property
    def _has_most(self) -> bool:
        """Whether a further call is left out."""
        return self._most_calls is not None and self._num_calls >= self._most_calls

    @property
    def _may_call(self) -> bool:
        return self._num_false < _MOST_FALSE

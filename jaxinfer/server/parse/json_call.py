"""A tool call as a JSON object, read character by character: its name, and its arguments as they are written."""

from __future__ import annotations

import json
import string
from collections.abc import Callable

_SPACE = " \t\n\r"
_ESCAPED = '"\\/bfnrt'  # by a backslash, in strings of JSON; and u, with four digits after it
_NUM_DIGITS = 4
_NAMES, _ARGUMENTS = ("name",), ("arguments", "parameters")


class MalformedError(Exception):
    """The text is no call."""


class JsonCall:
    """Reader of one object with a name and arguments.

    Arguments are handed out as the model has written them, from their first brace to their last. Those that come before
    the name wait for it, and a name waits for them: without an object of arguments it is no call.

    Args:
        is_known: whether a name is that of a tool.
        begin: called with the name, once.
        argue: called with each character of the arguments.
    """

    def __init__(
        self, is_known: Callable[[str], bool], begin: Callable[[str], None], argue: Callable[[str], None]
    ) -> None:
        self._is_known, self._begin, self._argue = is_known, begin, argue
        self._state: Callable[[str], None] = self._opening
        self.has_begun = self.has_ended = False
        self._key = self._string = self._waiting = ""
        self._name: str | None = None
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._is_argument = self._has_arguments = False
        self._digits: str | None = None  # of an escaped character that is being read

    def feed(self, letter: str) -> None:
        """Read a character.

        Raises:
            MalformedError: the text is no call.
        """
        self._state(letter)

    def _opening(self, letter: str) -> None:
        if letter == "{":
            self._state = self._before_key
        elif letter not in _SPACE:
            raise MalformedError

    def _before_key(self, letter: str) -> None:
        if letter == '"':
            self._string, self._state = "", self._in_key
        elif letter == "}":
            self._end()
        elif letter not in _SPACE:
            raise MalformedError

    def _in_key(self, letter: str) -> None:
        if self._reads_string(letter):
            self._key, self._state = self._decoded(), self._before_colon

    def _before_colon(self, letter: str) -> None:
        if letter == ":":
            self._state = self._before_value
        elif letter not in _SPACE:
            raise MalformedError

    def _before_value(self, letter: str) -> None:
        if letter in _SPACE:
            return
        if self._key in _NAMES:
            if letter != '"' or self._name is not None:
                raise MalformedError
            self._string, self._state = "", self._in_name
            return
        self._is_argument = self._key in _ARGUMENTS
        if self._is_argument:
            if letter != "{" or self._has_arguments:
                raise MalformedError
            self._has_arguments = True
            if self._name is not None:
                self._announce(self._name)
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._state = self._in_value
        self._in_value(letter)

    def _in_name(self, letter: str) -> None:
        if not self._reads_string(letter):
            return
        name = self._decoded()
        if not self._is_known(name):
            raise MalformedError
        self._name, self._state = name, self._after_value
        if self._has_arguments:
            self._announce(name)

    def _announce(self, name: str) -> None:
        self.has_begun = True
        self._begin(name)
        for waiting in self._waiting:
            self._argue(waiting)
        self._waiting = ""

    def _in_value(self, letter: str) -> None:
        if not (self._in_string or self._depth) and (letter in ",}" or letter in _SPACE):
            self._state = self._after_value  # the end of a number or a word
            self._after_value(letter)
            return
        if self._is_argument:
            text = self._as_json(letter)
            if self.has_begun:
                self._argue(text)
            else:
                self._waiting += text
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        if not (self._in_string or self._depth) and letter in '"}]':
            self._state = self._after_value

    def _as_json(self, letter: str) -> str:
        """Return a character of arguments as JSON has it. Models write line breaks within strings, and backslashes (of
        regular expressions and paths) that escape nothing; a backslash waits for what it may escape."""
        if not self._in_string:
            return letter
        before = ""
        if self._digits is not None:
            if letter in string.hexdigits:
                self._digits += letter
                if len(self._digits) < _NUM_DIGITS:
                    return ""
                found, self._digits = f"\\u{self._digits}", None
                return found
            before, self._digits = f"\\\\u{self._digits}", None
        text = json.dumps(letter)[1:-1] if letter < " " else letter
        if self._is_escaped and letter == "u":
            self._digits = ""
        elif self._is_escaped:
            return before + (f"\\{letter}" if letter in _ESCAPED else f"\\\\{text}")
        elif letter != "\\":
            return before + text
        return before

    def _after_value(self, letter: str) -> None:
        if letter == ",":
            self._state = self._before_next_key
        elif letter == "}":
            self._end()
        elif letter not in _SPACE:
            raise MalformedError

    def _before_next_key(self, letter: str) -> None:
        if letter == "}":
            raise MalformedError
        self._before_key(letter)

    def _end(self) -> None:
        if self._name is None:
            raise MalformedError
        if not self._has_arguments:
            self._announce(self._name)
            for letter in "{}":
                self._argue(letter)
        self.has_ended = True

    def _reads_string(self, letter: str) -> bool:
        """Read a character of a string after its first quote; returns whether it was the last quote."""
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            return True
        self._string += letter
        return False

    def _decoded(self) -> str:
        try:
            return json.loads(f'"{self._string}"', strict=False)
        except ValueError as error:
            raise MalformedError from error

"""A tool call as tags: `<function=NAME>`, and `<parameter=KEY>VALUE</parameter>` for each argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.server.json_text import refuse_constant
from jaxinfer.server.parse.formats import END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER
from jaxinfer.server.parse.json_call import MalformedError

_ENDS_OF_VALUE = (END_OF_PARAMETER, f"\n{PARAMETER}", f"\n{END_OF_FUNCTION}")
_MOST_IN_NAME = 256


class XmlCall:
    """Reader of one function's tags, whose arguments become JSON.

    A value whose parameter is a string by the tool's schema is handed out while it is written. Others wait for their
    end: they are JSON if they can be read as such, and strings otherwise. One line break at each end of a value is left
    out. What is no tag after a parameter ends the function, whose closing tag models forget.

    Attributes:
        rest: characters that were read after the end.

    Args:
        schemas: of the tools' parameters, by names of tools.
        begin: called with the name, once.
        argue: called with further characters of the arguments.
        has_opened: whether `<function=` was read already.
    """

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        begin: Callable[[str], None],
        argue: Callable[[str], None],
        *,
        has_opened: bool = False,
    ) -> None:
        self._schemas, self._begin, self._argue = schemas, begin, argue
        self._state: Callable[[str], None] = self._in_name if has_opened else self._before_function
        self.has_begun = self.has_ended = False
        self.rest = ""
        self._hold = self._name = self._value = ""
        self._num_parameters, self._streams = 0, False
        self._is_first = False

    def feed(self, letter: str) -> None:
        """Read a character.

        Raises:
            MalformedError: the text is no call.
        """
        self._state(letter)

    def _before_function(self, letter: str) -> None:
        if self._tag(letter, FUNCTION) == FUNCTION:
            self._state = self._in_name

    def _in_name(self, letter: str) -> None:
        if letter != ">":
            self._name += letter
            if len(self._name) > _MOST_IN_NAME or letter in "<\n":
                raise MalformedError
            return
        if self._name not in self._schemas:
            raise MalformedError
        self.has_begun, self._state = True, self._between
        self._begin(self._name)
        self._argue("{")

    def _between(self, letter: str) -> None:
        try:
            found = self._tag(letter, PARAMETER, END_OF_FUNCTION)
        except MalformedError:
            self._end(rest=self._hold)
            return
        if found == PARAMETER:
            self._value, self._state = "", self._in_key
        elif found == END_OF_FUNCTION:
            self._end()

    def _tag(self, letter: str, *tags: str) -> str | None:
        """Read a character of one of these tags or of the space before it; returns a tag that is complete.

        Raises:
            MalformedError: something else was written.
        """
        if not self._hold and letter.isspace():
            return None
        self._hold += letter
        if not any(tag.startswith(self._hold) for tag in tags):
            raise MalformedError
        if self._hold not in tags:
            return None
        found, self._hold = self._hold, ""
        return found

    def _in_key(self, letter: str) -> None:
        if letter != ">":
            self._value += letter
            if len(self._value) > _MOST_IN_NAME or letter in "<\n":
                self._end(rest=PARAMETER + self._value)
            return
        key, self._value = self._value, ""
        self._argue(f"{', ' if self._num_parameters else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        properties = self._schemas[self._name].get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._streams = isinstance(schema, Mapping) and schema.get("type") == "string"
        self._is_first, self._state = True, self._in_value
        if self._streams:
            self._argue('"')

    def _in_value(self, letter: str) -> None:
        self._hold += letter
        while self._hold and not any(end.startswith(self._hold) for end in _ENDS_OF_VALUE):
            self._take(self._hold[0])
            self._hold = self._hold[1:]
        if self._hold in _ENDS_OF_VALUE:
            found, self._hold = self._hold, ""
            self._end_value()
            if PARAMETER in found:
                self._value, self._state = "", self._in_key
            elif END_OF_FUNCTION in found:
                self._end()
            else:
                self._state = self._between

    def _take(self, letter: str) -> None:
        """Add a character to the value."""
        if self._is_first and letter == "\n":
            self._is_first = False
            return
        self._is_first = False
        if not self._streams:
            self._value += letter
            return
        # The last line break of a value is not part of it, so each waits for what comes after it.
        if self._value:
            self._argue(json.dumps(self._value, ensure_ascii=False)[1:-1])
            self._value = ""
        if letter == "\n":
            self._value = letter
        else:
            self._argue(json.dumps(letter, ensure_ascii=False)[1:-1])

    def _end_value(self) -> None:
        if self._streams:
            self._value = ""  # the last line break
            self._argue('"')
            return
        text = self._value.removesuffix("\n")
        try:
            json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            text = json.dumps(text, ensure_ascii=False)
        self._argue(text)
        self._value = ""

    def _end(self, *, rest: str = "") -> None:
        self._argue("}")
        self.has_ended, self.rest = True, rest

    def cut(self) -> None:
        """End the answer within the call: hand out what was read of a value."""
        if self._state == self._in_value:
            text = self._value + self._hold
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1] if self._streams else text)

"""JSON as text: read without what is no JSON, and so that other threads run while a long text is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from json.decoder import JSONArray, JSONObject  # pyright: ignore[reportAttributeAccessIssue]
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

# Texts that may have more values are read by Python's own functions: those in C take 0.1 microseconds a value, and
# stop all other threads until the end of the text.
_MOST_AT_ONCE = 1 << 18
MOST_VALUES = 1 << 20  # of a body


def loads(text: str, most_values: int | None = None) -> Any:
    """Return what a text of JSON says.

    Args:
        most_values: that it may have; None: any number.

    Raises:
        ValueError: it is not JSON, has a key twice, or too many values.
        RecursionError: it is nested too deeply.
    """
    options: dict[str, Any] = {
        "parse_constant": refuse_constant, "parse_float": finite_float, "object_pairs_hook": _without_doubles,
    }  # fmt: skip
    if text.count(",") <= _MOST_AT_ONCE:
        return json.loads(text, **options)
    return _Decoder(most_values, **options).decode(text)


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def finite_float(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text[:40]} is beyond all numbers")
    return found


def pieces_of(value: Any) -> Iterator[str]:
    """A value as JSON in pieces, one for each value within it; other threads run meanwhile."""
    return json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).iterencode(value)


def check_characters(value: Any) -> None:
    """Raise UnicodeError if a text within a value has half of a surrogate pair."""
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        piece.encode()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {double[:80]!r} occurs twice in one object")
    return found


class _Decoder(json.JSONDecoder):
    """Decoder of one text in Python, which counts values."""

    def __init__(self, most: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._most, self._count = most, 0
        self.parse_array, self.parse_object = self._array, self._object
        self.scan_once = py_make_scanner(self)

    def _array(self, place: Any, scan: Any) -> Any:
        return JSONArray(place, self._counting(scan))

    def _object(self, place: Any, strict: bool, scan: Any, *more: Any) -> Any:
        return JSONObject(place, strict, self._counting(scan), *more)

    def _counting(self, scan: Any) -> Any:
        def counting(text: str, place: int) -> Any:
            self._count += 1
            if self._most is not None and self._count > self._most:
                raise ValueError(f"it has more than {self._most} values")
            return scan(text, place)

        return counting

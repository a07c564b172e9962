"""Sets of characters, and the bytes of their UTF-8 forms."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

_SURROGATES = (0xD800, 0xDFFF)
_LAST_CHARACTER = 0x10FFFF

ByteRange = tuple[int, int]  # first and last


@dataclass(frozen=True)
class Characters:
    """A set of characters, as ranges of code points that do not overlap. Surrogates are never in it."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, letters: str) -> Characters:
        """Build the set of these characters."""
        return cls(tuple((code, code) for code in sorted(set(map(ord, letters)))))

    @classmethod
    def but(cls, *excluded: Characters) -> Characters:
        """Build the set of all characters but these."""
        allowed: list[tuple[int, int]] = []
        start = 0
        for first, last in sorted([_SURROGATES, *(pair for some in excluded for pair in some.ranges)]):
            if start < first:
                allowed.append((start, first - 1))
            start = max(start, last + 1)
        if start <= _LAST_CHARACTER:
            allowed.append((start, _LAST_CHARACTER))
        return cls(tuple(allowed))

    def __contains__(self, letter: str) -> bool:
        return any(first <= ord(letter) <= last for first, last in self.ranges)

    @functools.cached_property
    def byte_ranges(self) -> tuple[tuple[ByteRange, ...], ...]:
        """The UTF-8 forms of the characters: sequences of ranges, one byte from each."""
        return tuple(_utf8_forms(self.ranges))


def _utf8_forms(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[ByteRange, ...]]:
    for first, last in ranges:
        for low, high in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, _LAST_CHARACTER)):
            start, end = max(first, low), min(last, high)
            if start <= end:
                yield from _equally_long_forms(chr(start).encode(), chr(end).encode())


def _equally_long_forms(first: bytes, last: bytes) -> Iterator[tuple[ByteRange, ...]]:
    """Sequences of ranges for the forms from `first` to `last`: whole blocks in the middle, cut ones at the ends."""
    start, end, rest = first[0], last[0], len(first) - 1
    lowest, highest = b"\x80" * rest, b"\xbf" * rest
    if start == end and rest:
        yield from (((start, start), *tail) for tail in _equally_long_forms(first[1:], last[1:]))
        return
    if first[1:] != lowest:
        yield from (((start, start), *tail) for tail in _equally_long_forms(first[1:], highest))
        start += 1
    if last[1:] != highest:
        yield from (((end, end), *tail) for tail in _equally_long_forms(lowest, last[1:]))
        end -= 1
    if start <= end:
        yield ((start, end), *((0x80, 0xBF),) * rest)

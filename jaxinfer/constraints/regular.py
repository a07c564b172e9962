"""Regular expressions over bytes and marker tokens, and the nondeterministic automata that are built from them.

An expression is a function that continues a builder's automaton from a state and returns the state where it ends:

    >>> greeting = sequence(literal("Hello"), repeat(literal("!"), 1, 3))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxinfer.constraints.characters import ByteRange, Characters


class Edge(NamedTuple):
    """A step by any byte from `first` to `last`."""

    first: int
    last: int
    target: int


class Builder:
    """A nondeterministic automaton while it is built.

    Args:
        markers: texts that are tokens of their own: text -> id.
    """

    def __init__(self, markers: Mapping[str, int]) -> None:
        self.markers = markers
        self.edges: list[list[Edge]] = []
        self.marker_edges: list[dict[int, int]] = []  # token -> target
        self.free: list[list[int]] = []  # epsilon edges: states reached without a byte
        self._endings: dict[tuple[int, tuple[ByteRange, ...]], int] = {}

    def state(self) -> int:
        """Add a state and return it."""
        self.edges.append([])
        self.marker_edges.append({})
        self.free.append([])
        return len(self.edges) - 1

    def join(self, start: int, characters: Characters, target: int) -> None:
        """Let every one of the characters lead from `start` to `target`."""
        for (first, last), *rest in characters.byte_ranges:
            self.edges[start].append(Edge(first, last, self._before(target, tuple(rest))))

    def _before(self, target: int, ranges: tuple[ByteRange, ...]) -> int:
        """The state from which one byte of each range leads to `target`; equal endings of characters are shared."""
        if not ranges:
            return target
        known = self._endings.get((target, ranges))
        if known is None:
            known = self._endings[target, ranges] = self.state()
            (first, last), *rest = ranges
            self.edges[known].append(Edge(first, last, self._before(target, tuple(rest))))
        return known


Expression = Callable[[Builder, int], int]


def literal(text: str) -> Expression:
    """The text itself."""

    def build(builder: Builder, start: int) -> int:
        for byte in text.encode():
            following = builder.state()
            builder.edges[start].append(Edge(byte, byte, following))
            start = following
        return start

    return build


def marker(text: str) -> Expression:
    """A text that is written as its own token, or spelled out if there is no such token."""

    def build(builder: Builder, start: int) -> int:
        token = builder.markers.get(text)
        if token is None:
            return literal(text)(builder, start)
        following = builder.marker_edges[start][token] = builder.state()
        return following

    return build


def character(characters: Characters) -> Expression:
    """One of the characters."""

    def build(builder: Builder, start: int) -> int:
        end = builder.state()
        builder.join(start, characters, end)
        return end

    return build


def sequence(*parts: Expression) -> Expression:
    """The parts, one after the other."""

    def build(builder: Builder, start: int) -> int:
        for part in parts:
            start = part(builder, start)
        return start

    return build


def choice(*options: Expression) -> Expression:
    """One of the options."""

    def build(builder: Builder, start: int) -> int:
        # Each starts at a state of its own: the markers of two options may be the same.
        end = builder.state()
        for option in options:
            own = builder.state()
            builder.free[start].append(own)
            builder.free[option(builder, own)].append(end)
        return end

    return build


def repeat(part: Expression, least: int, most: int | None) -> Expression:
    """The part `least` to `most` times; None: any number of times."""

    def build(builder: Builder, start: int) -> int:
        for _ in range(least):
            start = part(builder, start)
        end = builder.state()
        if most is None:
            again = builder.state()
            builder.free[start].append(again)
            builder.free[part(builder, again)].append(again)
            start = again
        else:
            for _ in range(most - least):
                builder.free[start].append(end)
                start = part(builder, start)
        builder.free[start].append(end)
        return end

    return build


def optional(part: Expression) -> Expression:
    """The part or nothing."""
    return repeat(part, 0, 1)


def text_without(stop: str, first: Characters) -> Expression:
    """At least one character, the first of a given set, in which `stop` does not occur.

    The states are those of the search for `stop` (Knuth, Morris and Pratt 1977): its prefix that the text ends in.
    """

    def build(builder: Builder, start: int) -> int:
        seen = [builder.state() for _ in stop]
        end = builder.state()
        for length, state in enumerate(seen):
            builder.free[state].append(end)
            _go_on(builder, state, stop, stop[:length], seen, Characters.but())
        begin = builder.state()
        builder.free[start].append(begin)
        _go_on(builder, begin, stop, "", seen, first)
        return end

    return build


def _go_on(builder: Builder, state: int, stop: str, known: str, seen: list[int], within: Characters) -> None:
    """Let characters lead from a state to those of the search, unless they complete `stop`.

    Args:
        builder: the automaton.
        state: where they lead from.
        stop: the text that is searched for.
        known: the prefix of `stop` that the text ends in at `state`.
        seen: the states of the search, by the length of the prefix of `stop` that the text ends in.
        within: the characters that are possible at `state`.
    """
    letters = Characters.of(stop)
    builder.join(state, Characters.but(Characters.but(within), letters), seen[0])
    for letter in sorted(set(stop)):
        reached = _overlap(known + letter, stop)
        if letter in within and reached < len(stop):
            builder.join(state, Characters.of(letter), seen[reached])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    return next(length for length in range(min(len(text), len(stop)), -1, -1) if text.endswith(stop[:length]))

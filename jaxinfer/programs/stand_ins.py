"""Larger compiled programs in the place of those that are not compiled yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from jaxinfer.programs.program import Program

# A program is compiled once a larger one has run in its place so many times: by then it would have paid.
MOST_USES = 32
# A larger program computes at most so many times the tokens. Up to the second number, tokens cost next to nothing.
MOST_TIMES, FEW_TOKENS = 8, 16

# (program, shape) -> the shape in which it runs, which holds the other one.
type StandIn = Callable[[Program, Any], Any]


def as_wanted(program: Program, shape: Any) -> Any:
    """The shape itself."""
    return shape


class StandIns:
    """Choose shapes of launches: the wanted one, or a larger one while only that is compiled.

    An engine that was not warmed up compiles few programs this way before its first answers: a batch that shrinks needs
    none. What a larger program computes besides is padding, so no token changes.

    Args:
        compiled: (program, shape) of all programs that are compiled.
    """

    def __init__(self, compiled: Collection[tuple[Program, Any]]) -> None:
        self._compiled = compiled
        self._uses: Counter[tuple[Program, Any]] = Counter()

    def __call__(self, program: Program, shape: Any) -> Any:
        wanted = program, shape
        if wanted in self._compiled or self._uses[wanted] >= MOST_USES:
            return shape
        most = max(MOST_TIMES * shape.num_tokens, FEW_TOKENS)
        # A copy, because other threads compile meanwhile.
        larger = [
            other
            for one, other in list(self._compiled)
            if one is program and other.num_tokens <= most and other.holds(shape)
        ]
        if not larger:
            return shape
        self._uses[wanted] += 1
        return min(larger, key=lambda other: (other.num_tokens, other.pages_per_row))

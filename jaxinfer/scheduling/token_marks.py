"""Marks of a request's output tokens: which were accepted drafts, drawn again, or not drawn at all."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

DRAWN, DRAFT, REDRAWN, FORCED = "drawn", "draft", "redrawn", "forced"


@dataclass(slots=True)
class TokenMarks:
    """Numbers of output tokens by what they are, each list ascending. A mark may precede the landing of its token."""

    accepted_at: list[int] = field(default_factory=list)  # accepted drafts, of requests that return token sources
    redrawn_at: list[int] = field(default_factory=list)  # tokens that masks have changed
    forced_at: list[int] = field(default_factory=list)  # tokens that were not drawn

    def cut(self, count: int) -> None:
        """Forget the marks of all output tokens but the first `count`."""
        for numbers in (self.accepted_at, self.redrawn_at, self.forced_at):
            del numbers[bisect_left(numbers, count) :]

    def sources(self, first: int, last: int) -> list[str]:
        """Return of each output token in [first, last) what it is. A draft that was drawn again is "redrawn"."""
        found = [DRAWN] * (last - first)
        for name, numbers in ((DRAFT, self.accepted_at), (REDRAWN, self.redrawn_at), (FORCED, self.forced_at)):
            for number in numbers[bisect_left(numbers, first) : bisect_left(numbers, last)]:
                found[number - first] = name
        return found

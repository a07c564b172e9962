"""Versions of the weights that tokens were sampled with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

type Version = Any  # what an update was given, or the number of updates before it


@dataclass(slots=True)
class VersionRuns:
    """Versions of the weights that a request's output tokens were sampled with."""

    begins: list[tuple[int, Version]] = field(default_factory=list)  # (first output token, version), ascending

    @property
    def latest(self) -> int:
        """Number of the first token of the latest version."""
        return self.begins[-1][0] if self.begins else 0

    def note(self, num_landed: int, version: Version) -> None:
        """Note that tokens from number `num_landed` on are of this version."""
        while self.begins and self.begins[-1][0] >= num_landed:
            self.begins.pop()
        self.begins.append((num_landed, version))

    def runs(self, first: int, last: int) -> list[tuple[Version, int]]:
        """Return (version, number of tokens) of the output tokens in [first, last), in their order."""
        found: list[tuple[Version, int]] = []
        if not self.begins:  # of a request that no engine has had
            return found
        ends = [begin for begin, _ in self.begins[1:]] + [last]
        for (begin, version), end in zip(self.begins, ends, strict=True):
            count = min(end, last) - max(begin, first)
            if count > 0:
                found = joined(found, [(version, count)])
        return found


def joined(runs: list[tuple[Version, int]], more: list[tuple[Version, int]]) -> list[tuple[Version, int]]:
    """Return runs with those of the tokens after them."""
    if runs and more and runs[-1][0] == more[0][0]:
        return [*runs[:-1], (runs[-1][0], runs[-1][1] + more[0][1]), *more[1:]]
    return [*runs, *more]

"""How long launches of so many rounds take, as measured, and how many rounds are best where not all rows take them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# What is known of launches counts less with each further one.
_KEPT = 0.95
# A row that takes one round of a launch may wait so many times as long for its token as in launches of one round.
_LONGEST_WAIT = 2.0


@dataclass
class _Known:
    """Sums over launches of n rounds that took t seconds, each counting less as it ages."""

    count: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    t: float = 0.0
    nt: float = 0.0

    def note(self, rounds: int, seconds: float) -> None:
        for name, value in (("count", 1.0), ("n", rounds), ("nn", rounds**2), ("t", seconds), ("nt", rounds * seconds)):
            setattr(self, name, _KEPT * getattr(self, name) + value)

    def line(self) -> tuple[float, float]:
        """Seconds of a launch, and of each of its rounds, by least squares; neither is negative."""
        spread = self.count * self.nn - self.n**2
        each = self.nt / self.nn  # as if launches took nothing themselves
        if spread > 1e-2 * self.nn * self.count:
            each = max(0.0, (self.count * self.nt - self.n * self.t) / spread)
        launch = (self.t - each * self.n) / self.count
        return (launch, each) if launch >= 0 else (0.0, self.nt / self.nn)


class Pace:
    """The pace of one engine: from one landing to the next while launches follow each other.

    Launches of one kind differ in their rows and contexts. What they take changes slowly, and what was long ago counts
    for little.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def note(self, kind: Hashable, rounds: int, seconds: float) -> None:
        """A launch of so many rounds that ran took so long."""
        self._known.setdefault(kind, _Known()).note(rounds, seconds)

    def within(self, kind: Hashable, seconds: float) -> int:
        """The most rounds that end in so much time, at least 1; 1 as long as nothing is known."""
        known = self._known.get(kind)
        if known is None:
            return 1
        launch, each = known.line()
        return max(1, _whole((seconds - launch) / each)) if each > 0 else 1

    def beside_one_round(self, kind: Hashable, most: int, *, num_rows: int, num_of_one_round: int) -> int:
        """How many rounds, up to `most`, give the most rounds a second, where some rows take one of them only.

        No more than let these wait twice as long as in launches of one round.

        Args:
            num_rows: that take all rounds.
        """
        known = self._known.get(kind)
        if known is None or not num_rows:
            return 1
        launch, each = known.line()
        if each <= 0:
            return 1
        longest = _whole((_LONGEST_WAIT * (launch + each) - launch) / each)
        # Of n rounds, (num_rows * n + num_of_one_round) / (launch + each * n) grows with n or falls.
        grows = num_rows * launch > num_of_one_round * each
        return max(1, min(most, longest)) if grows else 1


def _whole(rounds: float) -> int:
    """The whole ones, where a sum of seconds may be a little off."""
    return int(rounds + 1e-6)

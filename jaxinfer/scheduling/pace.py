"""Measured times of launches by number of rounds, and the best number of rounds where not all rows take part in all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# Weight that is left to earlier launches by each further one.
_KEPT = 0.95
# Longest wait of a row that takes one round of a launch, as a multiple of its wait in launches of one round; and of a
# prompt for its chunk, as a multiple of its wait in steps with all rows.
_LONGEST_WAIT = 2.0
# One of so many decisions on how to run beside chunks is reversed, to measure again what the other way costs.
_TRIAL = 50
_ROUNDS_OF_TRIAL = 2


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
        """Return the seconds of a launch, and of each of its rounds, by least squares; neither is negative."""
        spread = self.count * self.nn - self.n**2
        each = self.nt / self.nn  # as if a launch itself took no time
        if spread > 1e-2 * self.nn * self.count:
            each = max(0.0, (self.count * self.nt - self.n * self.t) / spread)
        launch = (self.t - each * self.n) / self.count
        return (launch, each) if launch >= 0 else (0.0, self.nt / self.nn)


class Pace:
    """The pace of one engine: seconds from one landing to the next while launches follow each other.

    Launches of one kind differ in their rows and contexts, so their time changes slowly; old measurements count for
    little.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._num_decisions = 0  # on how to run beside chunks

    def note(self, kind: Hashable, rounds: int, seconds: float) -> None:
        """Note how long a launch took, and how many rounds ran in it."""
        self._known.setdefault(kind, _Known()).note(rounds, seconds)

    def within(self, kind: Hashable, seconds: float) -> int:
        """Return the most rounds that end within `seconds`, at least 1; 1 as long as nothing is known."""
        known = self._known.get(kind)
        if known is None:
            return 1
        launch, each = known.line()
        return max(1, _whole((seconds - launch) / each)) if each > 0 else 1

    def beside_chunks(
        self,
        kind: Hashable,
        most: int,
        tokens: float,
        *,
        mixed: Hashable,
        alone: Hashable,
        waits: bool,
        goes_on: bool,
    ) -> int:
        """Return how many rounds, up to `most`, rows run in a launch of their own after a step of chunks; 0: they take
        part in the step.

        While chunks follow chunks, it is the choice with the most tokens a second, if no prompt waits twice as long for
        its chunk. But if requests wait, or if rounds come next anyway, the same work is to take the least time: a
        launch of their own pays if it lands a token for each row in less time than they add to the step.

        Args:
            tokens: tokens that a round lands for a row.
            mixed, alone: the kinds under which steps with and without these rows are noted.
            waits: whether requests wait that this step has no room for.
            goes_on: whether there were chunks before, or will be after.
        """
        with_rows, without, known = self._known.get(mixed), self._known.get(alone), self._known.get(kind)
        if with_rows is None:
            return 0
        if without is None or known is None:
            return min(most, _ROUNDS_OF_TRIAL)
        step, chunks = sum(with_rows.line()), sum(without.line())
        launch, each = known.line()
        rounds = min(most, _whole((_LONGEST_WAIT * step - chunks - launch) / each)) if each > 0 else 0
        pays = False
        if rounds > 0:
            seconds, lands = launch + each * rounds, tokens * rounds
            is_urgent = goes_on and not waits
            pays = lands * step > chunks + seconds if is_urgent else lands * (step - chunks) > seconds
        self._num_decisions += 1
        if self._num_decisions % _TRIAL == 0:
            return 0 if pays else min(most, _ROUNDS_OF_TRIAL)
        return rounds if pays else 0

    def beside_one_round(self, kind: Hashable, most: int, *, num_rows: int, num_of_one_round: int) -> int:
        """Return how many rounds, up to `most`, give the most rounds a second if some rows take part in only one.

        These rows wait at most twice as long as in launches of one round.

        Args:
            num_rows: number of rows that take part in all rounds.
        """
        known = self._known.get(kind)
        if known is None or not num_rows:
            return 1
        launch, each = known.line()
        if each <= 0:
            return 1
        longest = _whole((_LONGEST_WAIT * (launch + each) - launch) / each)
        # With n rounds, (num_rows * n + num_of_one_round) / (launch + each * n) either grows with n or falls.
        grows = num_rows * launch > num_of_one_round * each
        return max(1, min(most, longest)) if grows else 1


def _whole(rounds: float) -> int:
    """Round down, with a tolerance because sums of seconds may be a little off."""
    return int(rounds + 1e-6)

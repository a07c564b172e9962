"""Device costs of launches: measured, and until then estimated from sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

# Observations of a program count less with each further launch. Measurements from before launches count as so many
# rounds. Estimates count as a fraction of a round, to fill in what launches leave open.
_KEPT = 0.9
_WEIGHT_OF_MEASURED, _TIMES_MEASURED = 16.0, 5
_LEAST_WEIGHT = 0.1

# Rows, pages per row, tokens of each row that are verified (1: a plain step), nodes of a tree (0: a chain).
type Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a step in arbitrary units: reading the weights, plus computing the tokens.

    Attributes:
        target, drafter: numbers of parameters; a drafter of 0 parameters costs nothing.
        knee: number of tokens whose computing takes as long as reading the weights.
    """

    target: float
    drafter: float
    knee: float

    def verification(self, tokens: int) -> float:
        return self.target * (1 + tokens / self.knee)

    def draft(self, rows: int) -> float:
        return self.drafter * (1 + rows / self.knee)


class _Cost:
    """Seconds of a program's round by its number of drafts: one verification, and each draft before it.

    It is a line fitted to timed launches. They count less as they age, and more with more rounds, over which the
    overhead of a launch is spread. Where all launches had equally many drafts, the line keeps the slope of the prior.

    Args:
        verification, draft: prior seconds of a verification and of a draft.
        most_drafts: of the program.
        weight: rounds that the prior counts as; 0: only the ratio of its two values is used.
    """

    def __init__(self, verification: float, draft: float, most_drafts: int, weight: float = 0.0) -> None:
        self.verification, self.draft = verification, draft
        self.num_measured = 0
        self._before, self._most, self._weight = (verification, draft), most_drafts, weight
        self._count = self._d = self._dd = self._t = self._dt = 0.0

    def seconds(self, num_drafts: int) -> float:
        return self.verification + num_drafts * self.draft

    def observe(self, num_drafts: int, seconds: float, rounds: int) -> None:
        if self._weight or self.num_measured:
            # A single launch during which the machine was busy otherwise must not count for much.
            seconds = min(seconds, 2 * self.seconds(num_drafts))
        if self.num_measured == 1 and seconds < self.seconds(num_drafts):
            self._count = self._d = self._dd = self._t = self._dt = 0.0  # that launch was the first
        self.num_measured += 1
        self._weight *= _KEPT
        new = {"_count": 1.0, "_d": num_drafts, "_dd": num_drafts**2, "_t": seconds, "_dt": num_drafts * seconds}
        for name, value in new.items():
            setattr(self, name, _KEPT * getattr(self, name) + rounds * value)
        self._fit()

    def _fit(self) -> None:
        """Fit the line to launches, to the prior measurement and, with a small weight, to the prior slope."""
        last, (verification, draft) = self._most, self._before
        expected = self._count * verification + self._d * draft
        scale = (self._weight * expected + self._count * self._t) / (self._weight * expected + self._count * expected)
        count, d, dd, t, dt = self._count, self._d, self._dd, self._t, self._dt
        for weight, factor in ((self._weight, 1.0), (_LEAST_WEIGHT, scale)):
            at_last = factor * (verification + last * draft)
            count, d, dd = count + 2 * weight, d + weight * last, dd + weight * last**2
            t, dt = t + weight * (factor * verification + at_last), dt + weight * last * at_last
        spread = count * dd - d**2
        each = min(max(0.0, (count * dt - d * t) / spread), t / d) if spread > 0 else 0.0
        self.verification, self.draft = (t - each * d) / count, each


class LaunchCosts:
    """Seconds of a round, by rows, page table and drafts.

    Costs of shapes that were not measured are estimated, scaled to fit the measured ones.

    Args:
        bucket: (rows, pages per row, drafts, nodes of trees) -> the shape of such a launch; None: there is none.
        estimate: for shapes that were not measured.
    """

    def __init__(self, bucket: Callable[[int, int, int, int], Key | None], estimate: Estimate) -> None:
        self._bucket, self._estimate = bucket, estimate
        self._known: dict[Key, _Cost] = {}
        self._unit = 1.0  # seconds of one unit of the estimate: the median over measured shapes

    def seconds(self, rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0) -> float | None:
        """Return the seconds of one round with so many drafts, or of a plain step; None: there is no such program."""
        key = self._bucket(rows, pages_per_row, num_drafts, num_nodes)
        if key is None:
            return None
        known = self._known.get(key)
        return (self._estimated(key) if known is None else known).seconds(num_drafts)

    def program(self, rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0) -> Key | None:
        """Return the key of the program of such a launch; None: there is none."""
        return self._bucket(rows, pages_per_row, num_drafts, num_nodes)

    def num_measured(self, key: Key) -> int:
        """Return how often a program was timed, in launches or in measurements before them."""
        known = self._known.get(key)
        return 0 if known is None else known.num_measured

    def set(self, key: Key, *, verification: float, draft: float) -> None:
        """Set the measured cost of a shape, in seconds."""
        known = self._known[key] = _Cost(verification, draft, key[2] - 1, _WEIGHT_OF_MEASURED)
        known.num_measured = _TIMES_MEASURED
        self._learn_unit()

    def observe(
        self, rows: int, pages_per_row: int, num_drafts: int, seconds: float, num_nodes: int = 0, *, rounds: int = 1
    ) -> None:
        """Record the seconds of each round, or plain step, of a launch."""
        key = self._bucket(rows, pages_per_row, num_drafts, num_nodes)
        if key is None:
            return
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._estimated(key)
        known.observe(num_drafts, seconds, rounds)
        self._learn_unit()

    def _estimated(self, key: Key) -> _Cost:
        rows, _, width, num_nodes = key
        # A level of a tree drafts for about as many nodes of each row as the square root of all its nodes.
        drafting = rows * max(1, round(num_nodes**0.5))
        verification = self._unit * self._estimate.verification(rows * width)
        return _Cost(verification, self._unit * self._estimate.draft(drafting) if width > 1 else 0.0, width - 1)

    def _learn_unit(self) -> None:
        self._unit = statistics.median(
            known.verification / self._estimate.verification(rows * width)
            for (rows, _, width, _), known in self._known.items()
        )

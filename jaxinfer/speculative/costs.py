"""What launches cost the device: measured, and until then estimated from sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

# What is known of a program counts less with each further launch. What was measured before launches counts as so many
# rounds, and what was only estimated as a bit of one, for what launches do not tell.
_KEPT = 0.9
_WEIGHT_OF_MEASURED, _TIMES_MEASURED = 16.0, 5
_LEAST_WEIGHT = 0.1

# Rows, pages per row, tokens of each row that are verified (1: a plain step), nodes of a tree (0: a chain).
type Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class Estimate:
    """Of a step in arbitrary units: weights are read, or tokens computed, whichever takes longer in the end.

    Attributes:
        target, drafter: parameters; a drafter of 0 drafts for nothing.
        knee: tokens whose computing takes as long as reading the weights.
    """

    target: float
    drafter: float
    knee: float

    def verification(self, tokens: int) -> float:
        return self.target * (1 + tokens / self.knee)

    def draft(self, rows: int) -> float:
        return self.drafter * (1 + rows / self.knee)


class _Cost:
    """Seconds of a program's rounds by drafts: those of a verification, and of each draft before it.

    A line through what launches took, which counts less as they age, and more the more rounds a launch had: what a
    launch takes besides belongs to all of them. Where all had as many drafts, it has the slope of what was taken to be
    before.

    Args:
        verification, draft: what is taken to be.
        most_drafts: of the program.
        weight: how many rounds that counts as; 0: only the ratio of the two is worth something.
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
            # One launch in which the machine was busy with something else must not count for much.
            seconds = min(seconds, 2 * self.seconds(num_drafts))
        self.num_measured += 1
        self._weight *= _KEPT
        new = {"_count": 1.0, "_d": num_drafts, "_dd": num_drafts**2, "_t": seconds, "_dt": num_drafts * seconds}
        for name, value in new.items():
            setattr(self, name, _KEPT * getattr(self, name) + rounds * value)
        self._fit()

    def _fit(self) -> None:
        """The line nearest to launches, to what was measured before, and, by a little, to the slope believed in."""
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

    Shapes that were not measured are estimated, in the unit that measured ones have.

    Args:
        bucket: (rows, pages per row, drafts, nodes of trees) -> the shape that such a launch has; None: there is none.
        estimate: of shapes that were not measured.
    """

    def __init__(self, bucket: Callable[[int, int, int, int], Key | None], estimate: Estimate) -> None:
        self._bucket, self._estimate = bucket, estimate
        self._known: dict[Key, _Cost] = {}
        self._unit = 1.0  # seconds of one unit of the estimate: the median of what is known of measured shapes

    def seconds(self, rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0) -> float | None:
        """Of one round with so many drafts, or of a plain step; None: there is no such program."""
        key = self._bucket(rows, pages_per_row, num_drafts, num_nodes)
        if key is None:
            return None
        known = self._known.get(key)
        return (self._estimated(key) if known is None else known).seconds(num_drafts)

    def program(self, rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0) -> Key | None:
        """What launches of the same program have in common; None: there is none."""
        return self._bucket(rows, pages_per_row, num_drafts, num_nodes)

    def num_measured(self, key: Key) -> int:
        """How often a program was timed, that is, launched or measured before."""
        known = self._known.get(key)
        return 0 if known is None else known.num_measured

    def set(self, key: Key, *, verification: float, draft: float) -> None:
        """What was measured of a shape."""
        known = self._known[key] = _Cost(verification, draft, key[2] - 1, _WEIGHT_OF_MEASURED)
        known.num_measured = _TIMES_MEASURED
        self._learn_unit()

    def observe(
        self, rows: int, pages_per_row: int, num_drafts: int, seconds: float, num_nodes: int = 0, *, rounds: int = 1
    ) -> None:
        """Each of the rounds, or steps, of a launch took so long."""
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
        # A level of a tree drafts for a few nodes of each row, about as many as the square root of all.
        drafting = rows * max(1, round(num_nodes**0.5))
        verification = self._unit * self._estimate.verification(rows * width)
        return _Cost(verification, self._unit * self._estimate.draft(drafting) if width > 1 else 0.0, width - 1)

    def _learn_unit(self) -> None:
        self._unit = statistics.median(
            known.verification / self._estimate.verification(rows * width)
            for (rows, _, width, _), known in self._known.items()
        )

"""What launches cost the device: measured, and until then estimated from sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# How much of an estimate a further measurement takes the place of.
_NEW = 0.2

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


@dataclass
class _Cost:
    """Seconds: of a verification or a plain step, and of each draft before it."""

    verification: float
    draft: float


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
        self._unit = 1.0  # seconds of one unit of the estimate
        self._has_unit = False

    def seconds(self, rows: int, pages_per_row: int, num_drafts: int, num_nodes: int = 0) -> float | None:
        """Of one round with so many drafts, or of a plain step; None: there is no such program."""
        key = self._bucket(rows, pages_per_row, num_drafts, num_nodes)
        if key is None:
            return None
        known = self._known.get(key) or self._estimated(key)
        return known.verification + num_drafts * known.draft

    def set(self, key: Key, *, verification: float, draft: float) -> None:
        """What was measured of a shape."""
        self._known[key] = _Cost(verification, draft)
        self._learn_unit(key, verification, 1.0)

    def observe(self, rows: int, pages_per_row: int, num_drafts: int, seconds: float, num_nodes: int = 0) -> None:
        """One round, or step, of a launch took so long."""
        key = self._bucket(rows, pages_per_row, num_drafts, num_nodes)
        if key is None:
            return
        known = self._known.get(key)
        if known is None:
            estimated = self._estimated(key)
            ratio = seconds / (estimated.verification + num_drafts * estimated.draft)
            self._learn_unit(key, estimated.verification * ratio, _NEW)
            self._known[key] = _Cost(estimated.verification * ratio, estimated.draft * ratio)
            return
        ratio = seconds / (known.verification + num_drafts * known.draft)
        # One launch in which the machine was busy with something else must not count for much.
        ratio = 1 + _NEW * (min(ratio, 2.0) - 1)
        known.verification *= ratio
        known.draft *= ratio

    def _estimated(self, key: Key) -> _Cost:
        rows, _, width, num_nodes = key
        # A level of a tree drafts for a few nodes of each row, about as many as the square root of all.
        drafting = rows * max(1, round(num_nodes**0.5))
        return _Cost(
            self._unit * self._estimate.verification(rows * width),
            self._unit * self._estimate.draft(drafting) if width > 1 else 0.0,
        )

    def _learn_unit(self, key: Key, verification: float, new: float) -> None:
        unit = verification / self._estimate.verification(key[0] * key[2])
        self._unit = unit if not self._has_unit else (1 - new) * self._unit + new * unit
        self._has_unit = True

"""How often drafts are accepted, by depth: of all sequences, and of each, as far as it has shown it."""

from __future__ import annotations

import numpy as np

from jaxinfer.speculative.gamma import RoundsReport

# A sequence's own record counts as much as that of all after so many rounds, and rounds count less as they age.
_ROUNDS_OF_ALL = 8.0
_KEPT_BY_SEQUENCE = 0.97
_KEPT_BY_ALL = 0.995
# What is believed before anything was seen counts as so many rounds.
_ROUNDS_OF_BELIEF = 8.0


class Acceptance:
    """The chance of the draft at depth d to be accepted, where those before it were.

    A sequence for which nothing was drafted although something was asked for counts as one whose first draft was
    rejected: it gained nothing.
    """

    def __init__(self, num_seats: int, max_drafts: int, *, belief: float) -> None:
        self._tried = np.full(max_drafts, _ROUNDS_OF_BELIEF)
        self._kept = self._tried * belief
        self._tried_in_seat = np.zeros((num_seats, max_drafts))
        self._kept_in_seat = np.zeros((num_seats, max_drafts))

    def enter(self, seat: int) -> None:
        """Another sequence has the seat: nothing is known of it."""
        self._tried_in_seat[seat] = self._kept_in_seat[seat] = 0.0

    def observe(self, report: RoundsReport) -> None:
        depth = np.arange(len(self._tried))[:, None, None]
        took_part = report.ran & (report.wanted > 0)
        drafted = np.maximum(report.drafted, 1)
        tried = ((report.accepted >= depth) & (drafted > depth) & took_part).sum(axis=1)  # [D, R]
        kept = ((report.accepted > depth) & took_part).sum(axis=1)
        rounds = took_part.sum(axis=0)
        fades = _KEPT_BY_SEQUENCE ** rounds[:, None]
        self._tried_in_seat[report.seats] = self._tried_in_seat[report.seats] * fades + tried.T
        self._kept_in_seat[report.seats] = self._kept_in_seat[report.seats] * fades + kept.T
        fades = _KEPT_BY_ALL ** rounds.sum()
        self._tried = self._tried * fades + tried.sum(axis=1)
        self._kept = self._kept * fades + kept.sum(axis=1)

    def of_all(self) -> np.ndarray:
        """float [D]"""
        return (self._kept + 0.5) / (self._tried + 1.0)

    def tokens(self, seats: np.ndarray) -> np.ndarray:
        """float [D + 1]: what a round of the sequences in these seats lands in all, with 0 to D drafts for each."""
        belief = _ROUNDS_OF_ALL * self.of_all()
        rates = (self._kept_in_seat[seats] + belief) / (self._tried_in_seat[seats] + _ROUNDS_OF_ALL)
        return _expected(rates).sum(axis=0)

    def tokens_of_unknown(self, rows: int) -> np.ndarray:
        """The same for sequences of which nothing is known."""
        return rows * _expected(self.of_all()[None])[0]


def _expected(rates: np.ndarray) -> np.ndarray:
    """float [R, D + 1] from float [R, D]: 1 token, and one more for each draft that is accepted with all before it."""
    return np.cumsum(np.cumprod(np.pad(rates, ((0, 0), (1, 0)), constant_values=1.0), axis=1), axis=1)

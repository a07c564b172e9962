"""Acceptance rates of drafts by depth, over all sequences and for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxinfer.speculative.gamma import RoundsReport

# After so many rounds, a sequence's own record counts as much as that of all. Rounds count less as they age.
_ROUNDS_OF_ALL = 8.0
_KEPT_BY_SEQUENCE = 0.97
_KEPT_BY_ALL = 0.995
# The prior counts as so many observed rounds, and the rate of a depth as so many observations of the next depth.
_ROUNDS_OF_BELIEF = 8.0
_ROUNDS_OF_DEPTH = 2.0


class Acceptance:
    """Estimates of the chance that a round drafts anything where drafts are wanted, and of the chance that the draft at
    each depth is accepted where those before it were.

    Args:
        drafts, accepted: prior values of the two.
    """

    def __init__(self, num_seats: int, max_drafts: int, *, drafts: float, accepted: float) -> None:
        # Over all sequences, then for each seat. Column 0 counts rounds and those with drafts, the others each depth.
        self._tried = np.zeros(max_drafts + 1)
        self._tried[:2] = _ROUNDS_OF_BELIEF
        self._kept = self._tried * np.asarray([drafts, *[accepted] * max_drafts])
        # The last row is for NO_SEAT, and stays 0.
        self._tried_in_seat = np.zeros((num_seats + 1, max_drafts + 1))
        self._kept_in_seat = np.zeros((num_seats + 1, max_drafts + 1))

    def enter(self, seat: int) -> None:
        """Forget the record of a seat, which another sequence has entered."""
        self._tried_in_seat[seat] = self._kept_in_seat[seat] = 0.0

    def observe(self, report: RoundsReport) -> None:
        """Record the outcome of a launch of rounds."""
        depth = np.arange(len(self._tried) - 1)[:, None, None]
        wanted = report.ran & (report.wanted > 0)
        drafted = wanted & (report.drafted > 0)
        tried = np.concatenate([wanted[None], drafted & (report.accepted >= depth) & (report.drafted > depth)])
        kept = np.concatenate([drafted[None], drafted & (report.accepted > depth)])
        tried, kept = tried.sum(axis=1), kept.sum(axis=1)  # [D + 1, R]
        rounds = wanted.sum(axis=0)
        fades = _KEPT_BY_SEQUENCE ** rounds[:, None]
        self._tried_in_seat[report.seats] = self._tried_in_seat[report.seats] * fades + tried.T
        self._kept_in_seat[report.seats] = self._kept_in_seat[report.seats] * fades + kept.T
        fades = _KEPT_BY_ALL ** wanted.any(axis=1).sum()
        self._tried = self._tried * fades + tried.sum(axis=1)
        self._kept = self._kept * fades + kept.sum(axis=1)

    def of_all(self) -> np.ndarray:
        """Return float [1 + D]: the share of rounds in which anything is drafted, then acceptance rates by depth.

        A depth that was seldom drafted takes the rate of the depth before it.
        """
        rates = (self._kept + 0.5) / (self._tried + 1.0)
        for depth in range(2, len(rates)):
            belief = _ROUNDS_OF_DEPTH * rates[depth - 1]
            rates[depth] = (self._kept[depth] + belief) / (self._tried[depth] + _ROUNDS_OF_DEPTH)
        return rates

    def forecast(self, seats: np.ndarray) -> Forecast:
        """Forecast a round of the sequences in these seats, some of which may be `NO_SEAT`."""
        belief = _ROUNDS_OF_ALL * self.of_all()
        return _forecast((self._kept_in_seat[seats] + belief) / (self._tried_in_seat[seats] + _ROUNDS_OF_ALL))

    def forecast_of_unknown(self, rows: int) -> Forecast:
        """Forecast a round of `rows` sequences without a record."""
        return _forecast(np.repeat(self.of_all()[None], rows, axis=0))


@dataclass(frozen=True)
class Forecast:
    """Expected outcome of a round."""

    tokens: np.ndarray  # float [D + 1], tokens that land over all rows, with 0 to D drafts wanted for each sequence
    any_drafts: float  # chance that anything is drafted for any row


def _forecast(rates: np.ndarray) -> Forecast:
    """Forecast a round from rates float [R, 1 + D]: a row lands 1 token, and one more for each accepted draft."""
    more = np.cumsum(np.cumprod(rates[:, 1:], axis=1), axis=1) * rates[:, :1]
    tokens = len(rates) + np.pad(more.sum(axis=0), (1, 0))
    return Forecast(tokens, float(1 - np.prod(1 - rates[:, 0])))

"""How often drafts are accepted, by depth: of all sequences, and of each, as far as it has shown it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxinfer.speculative.gamma import RoundsReport

# A sequence's own record counts as much as that of all after so many rounds, and rounds count less as they age.
_ROUNDS_OF_ALL = 8.0
_KEPT_BY_SEQUENCE = 0.97
_KEPT_BY_ALL = 0.995
# What is believed before anything was seen counts as so many rounds, what is known of a depth as so many of the next.
_ROUNDS_OF_BELIEF = 8.0
_ROUNDS_OF_DEPTH = 2.0


class Acceptance:
    """The chance that anything is drafted where something is wanted; and that the draft at depth d is accepted, where
    those before it were.

    Args:
        drafts, accepted: what these are taken to be until some was seen.
    """

    def __init__(self, num_seats: int, max_drafts: int, *, drafts: float, accepted: float) -> None:
        # Of all sequences and of that in each seat: column 0 for rounds and those with drafts, then by depth.
        self._tried = np.zeros(max_drafts + 1)
        self._tried[:2] = _ROUNDS_OF_BELIEF
        self._kept = self._tried * np.asarray([drafts, *[accepted] * max_drafts])
        # The last row is that of NO_SEAT, and stays 0.
        self._tried_in_seat = np.zeros((num_seats + 1, max_drafts + 1))
        self._kept_in_seat = np.zeros((num_seats + 1, max_drafts + 1))

    def enter(self, seat: int) -> None:
        """Another sequence has the seat: nothing is known of it."""
        self._tried_in_seat[seat] = self._kept_in_seat[seat] = 0.0

    def observe(self, report: RoundsReport) -> None:
        """What came of a launch of rounds."""
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
        """float [1 + D]: the share of rounds in which anything is drafted, and what is accepted, by depth.

        A depth that was seldom drafted is taken to be as the one before it.
        """
        rates = (self._kept + 0.5) / (self._tried + 1.0)
        for depth in range(2, len(rates)):
            belief = _ROUNDS_OF_DEPTH * rates[depth - 1]
            rates[depth] = (self._kept[depth] + belief) / (self._tried[depth] + _ROUNDS_OF_DEPTH)
        return rates

    def forecast(self, seats: np.ndarray) -> Forecast:
        """The forecast of a round of the sequences in these seats, some of which may be `NO_SEAT`."""
        belief = _ROUNDS_OF_ALL * self.of_all()
        return _forecast((self._kept_in_seat[seats] + belief) / (self._tried_in_seat[seats] + _ROUNDS_OF_ALL))

    def forecast_of_unknown(self, rows: int) -> Forecast:
        """The same for sequences of which nothing is known."""
        return _forecast(np.repeat(self.of_all()[None], rows, axis=0))


@dataclass(frozen=True)
class Forecast:
    """What a round is expected to bring."""

    tokens: np.ndarray  # float [D + 1], that land in all, with 0 to D drafts wanted for each sequence
    any_drafts: float  # the chance that anything is drafted for anybody


def _forecast(rates: np.ndarray) -> Forecast:
    """From rates float [R, 1 + D]: 1 token, and one more for each draft that is accepted with all before it."""
    more = np.cumsum(np.cumprod(rates[:, 1:], axis=1), axis=1) * rates[:, :1]
    tokens = len(rates) + np.pad(more.sum(axis=0), (1, 0))
    return Forecast(tokens, float(1 - np.prod(1 - rates[:, 0])))

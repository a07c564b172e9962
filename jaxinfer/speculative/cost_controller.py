"""As many drafts as give the most tokens per second for the batch at hand; none, where plain decoding does."""

from __future__ import annotations

import numpy as np

from jaxinfer.speculative.acceptance import Acceptance, Forecast
from jaxinfer.speculative.costs import LaunchCosts
from jaxinfer.speculative.gamma import RoundsReport, TimedLaunch

# Estimates are not exact: drafting has to promise so much more.
_MARGIN = 1.06
# How much of what is known of rounds without drafts a further measurement takes the place of.
_NEW = 0.1
# The share of time that may go into finding out whether drafts would be accepted by now.
_PROBING = 0.02
# Before it can draft again a drafter takes in what it missed: about as long as so many drafts.
_CATCH_UP_DRAFTS = 8


class CostController:
    """Chooses by the costs of launches and the acceptance of drafts, both as measured.

    Where plain decoding is best, a round is tried now and then, so that it is noticed when drafts become worth it:
    sequences change, and so does what is known of them.

    Args:
        drafts: the share of rounds in which anything is drafted, until it is known; 1: in all of them, always.
        accepted: the share of drafts that is accepted, until it is known.
    """

    def __init__(
        self, num_seats: int, max_drafts: int, costs: LaunchCosts, *, drafts: float = 1.0, accepted: float
    ) -> None:
        self.costs: LaunchCosts | None = costs
        self._costs = costs
        self.acceptance = Acceptance(num_seats, max_drafts, drafts=drafts, accepted=accepted)
        self.max_drafts = max_drafts
        self._always_drafts = drafts == 1.0
        self._plain_seconds = 0.0  # of launches since the last round
        self._without_drafts = 1.0  # what a round in which nothing is drafted takes, in plain steps

    def choose(self, seats: np.ndarray, pages_per_row: int) -> np.ndarray:
        rows = len(seats)
        best, gain = self._best(self.acceptance.forecast(seats), rows, pages_per_row)
        if gain < _MARGIN and not (best and self._may_probe(best, rows, pages_per_row)):
            best = 0
        if best:
            self._plain_seconds = 0.0
        return np.full(rows, best)

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        return self._best(self.acceptance.forecast_of_unknown(rows), rows, pages_per_row)[1] >= _MARGIN

    def enter(self, seat: int) -> None:
        self.acceptance.enter(seat)

    def observe(self, report: RoundsReport) -> None:
        self.acceptance.observe(report)

    def timed(self, launch: TimedLaunch) -> None:
        plain = self._costs.seconds(launch.rows, launch.pages_per_row, 0) or 0.0
        if not launch.num_drafts:
            self._plain_seconds += launch.seconds
            self._costs.observe(launch.rows, launch.pages_per_row, 0, launch.seconds / launch.rounds)
        elif launch.rounds == launch.rounds_without:
            ratio = min(launch.seconds / (launch.rounds * plain), 2.0)
            self._without_drafts += _NEW * (max(ratio, 1.0) - self._without_drafts)
        else:
            seconds = launch.seconds - launch.rounds_without * plain * self._without_drafts
            each = max(seconds / (launch.rounds - launch.rounds_without), plain)
            self._costs.observe(launch.rows, launch.pages_per_row, launch.num_drafts, each)

    def _best(self, forecast: Forecast, rows: int, pages_per_row: int) -> tuple[int, float]:
        """The number of drafts, at least 1, with the most tokens a second, and how many times those of plain decoding
        that is; 0: there is no program."""
        plain = self._costs.seconds(rows, pages_per_row, 0)
        assert plain is not None
        best, gain = 0, 0.0
        for number in range(1, self.max_drafts + 1):
            seconds = self._costs.seconds(rows, pages_per_row, number)
            if seconds is None:
                continue
            if not self._always_drafts:
                without = plain * self._without_drafts
                seconds = without + forecast.any_drafts * max(0.0, seconds - without)
            found = float(forecast.tokens[number]) / seconds * plain / rows
            if found > gain:
                best, gain = number, found
        return best, gain

    def _may_probe(self, num_drafts: int, rows: int, pages_per_row: int) -> bool:
        """Whether enough time went into plain launches for a round with all that it needs."""
        one, plain = (self._costs.seconds(rows, pages_per_row, number) for number in (num_drafts, 0))
        assert one is not None and plain is not None
        return _PROBING * self._plain_seconds > one + _CATCH_UP_DRAFTS * max(one - plain, 0.0) / num_drafts

"""As many drafts as give the most tokens per second for the batch at hand; none, where plain decoding does."""

from __future__ import annotations

import numpy as np

from jaxinfer.speculative.acceptance import Acceptance
from jaxinfer.speculative.costs import LaunchCosts
from jaxinfer.speculative.gamma import RoundsReport

# Estimates are not exact: drafting has to promise so much more.
_MARGIN = 1.03
# The share of time that may go into finding out whether drafts would be accepted by now.
_PROBING = 0.02
# Before it can draft again a drafter takes in what it missed: about as long as so many drafts.
_CATCH_UP_DRAFTS = 8


class CostController:
    """Chooses by the costs of launches and the acceptance of drafts, both as measured.

    Where plain decoding is best, a round is tried now and then, so that it is noticed when drafts become worth it:
    sequences change, and so does what is known of them.
    """

    def __init__(self, num_seats: int, max_drafts: int, costs: LaunchCosts, *, belief: float) -> None:
        self.costs: LaunchCosts | None = costs
        self._costs = costs
        self.acceptance = Acceptance(num_seats, max_drafts, belief=belief)
        self.max_drafts = max_drafts
        self._plain_seconds = 0.0  # of launches since the last round

    def choose(self, seats: np.ndarray, pages_per_row: int) -> np.ndarray:
        rows = len(seats)
        tokens = self.acceptance.tokens(seats)
        best, rate = self._best(tokens, rows, pages_per_row)
        plain = self._costs.seconds(rows, pages_per_row, 0)
        if (
            best
            and plain is not None
            and rate < _MARGIN * rows / plain
            and not self._may_probe(best, rows, pages_per_row)
        ):
            best = 0
        if best:
            self._plain_seconds = 0.0
        return np.full(rows, best)

    def would_draft(self, rows: int, pages_per_row: int) -> bool:
        best, rate = self._best(self.acceptance.tokens_of_unknown(rows), rows, pages_per_row)
        plain = self._costs.seconds(rows, pages_per_row, 0)
        return bool(best) and (plain is None or rate >= _MARGIN * rows / plain)

    def enter(self, seat: int) -> None:
        self.acceptance.enter(seat)

    def observe(self, report: RoundsReport) -> None:
        self.acceptance.observe(report)

    def timed(self, num_drafts: int, rows: int, pages_per_row: int, rounds: int, seconds: float) -> None:
        self._costs.observe(rows, pages_per_row, num_drafts, seconds / rounds)
        if not num_drafts:
            self._plain_seconds += seconds

    def _best(self, tokens: np.ndarray, rows: int, pages_per_row: int) -> tuple[int, float]:
        """The number of drafts, at least 1, with the most tokens a second, and how many; 0: there is no program."""
        best, rate = 0, 0.0
        for number in range(1, self.max_drafts + 1):
            seconds = self._costs.seconds(rows, pages_per_row, number)
            if seconds is not None and tokens[number] / seconds > rate:
                best, rate = number, float(tokens[number]) / seconds
        return best, rate

    def _may_probe(self, num_drafts: int, rows: int, pages_per_row: int) -> bool:
        """Whether enough time went into plain launches for a round with all that it needs."""
        one, two = (self._costs.seconds(rows, pages_per_row, number) for number in (num_drafts, 0))
        if one is None or two is None:
            return False
        return _PROBING * self._plain_seconds > one + _CATCH_UP_DRAFTS * max(one - two, 0.0) / num_drafts

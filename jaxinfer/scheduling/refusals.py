"""How often a request's guard refuses what is drawn, and what the request may never draw."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import numpy as np

# Weight of a token in the moving shares of refused tokens and of breaks, and their value at the beginning, where
# nothing is known. Then the shares of refused ones between which all draws get masks, or none again: a refusal costs
# two launches, a mask the overlap of host and device, one launch in three on a CPU. So one refusal is reason enough for
# masks, and a dozen allowed tokens to end them.
WEIGHT_OF_TOKEN, AT_FIRST = 0.2, 0.1
# The share of breaks at the beginning where there is a grammar. It is greater, because a break loses the rounds of all
# launches in flight: the first launches have few rounds, and each that is allowed doubles them.
BREAKS_AT_FIRST = 0.5
FREQUENT, SELDOM = 0.1, 0.02


class Refusals:
    """Shares of a request's drawn tokens that its guard has refused of late, and after which its sequence breaks.

    A sequence breaks at a refused token, and where forced tokens follow a drawn one: that loses what is in flight for
    the request. Where tokens are refused again and again, every draw gets a mask, and the request waits for each token:
    that loses less.

    Args:
        breaks_at_first: the share of breaks to begin with.
    """

    def __init__(self, breaks_at_first: float = AT_FIRST) -> None:
        self.share, self._of_breaks = AT_FIRST, breaks_at_first
        self.are_frequent = self.share > FREQUENT

    def note(self, num_kept: int, *, is_refused: bool, is_forced: bool = False) -> None:
        """Note tokens that were allowed, whether one after them was not, and whether forced ones follow."""
        self.share = _moved(self.share, num_kept, is_one=is_refused)
        is_last_a_break = is_forced and not is_refused and num_kept > 0
        self._of_breaks = _moved(self._of_breaks, num_kept - is_last_a_break, is_one=is_refused or is_forced)
        self.are_frequent = self.share > (SELDOM if self.are_frequent else FREQUENT)

    @property
    def expects_breaks(self) -> bool:
        """Whether rounds have a bound at all."""
        return self._of_breaks > 0

    def most_rounds(self, tokens_per_round: float) -> int:
        """Return after how many rounds the next break is expected, at least 1."""
        if self._of_breaks <= 0:
            return sys.maxsize
        return max(1, round((1 - self._of_breaks) / self._of_breaks / tokens_per_round))


def _moved(share: float, num_others: int, *, is_one: bool) -> float:
    """Return a moving share after tokens that are not counted, and one that is or is not there."""
    share *= (1 - WEIGHT_OF_TOKEN) ** num_others
    return share + WEIGHT_OF_TOKEN * (1 - share) * is_one


class Excluded:
    """The tokens that a request may never draw, as a container.

    Args:
        allowed: the only tokens that it may draw; None: any.
        bad_sequences: tokens of those with a single one.
    """

    def __init__(self, allowed: Collection[int] | None, bad_sequences: Sequence[Sequence[int]]) -> None:
        self._allowed = None if allowed is None else frozenset(allowed)
        self._bad = frozenset(sequence[0] for sequence in bad_sequences if len(sequence) == 1)

    def __contains__(self, token: object) -> bool:
        return token in self._bad or (self._allowed is not None and token not in self._allowed)

    def members(self, vocab: int) -> np.ndarray:
        """bool [vocab]: all of them."""
        found = np.full(vocab, self._allowed is not None)
        found[list(self._allowed or ())] = False
        found[list(self._bad)] = True
        return found

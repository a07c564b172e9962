"""How often a request's guard refuses what is drawn, and what the request may never draw."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

# Weight of a token in the moving share of refused tokens, and its value at the beginning, where nothing is known. Then
# the shares between which all draws get masks, or none again: a refusal costs two launches, a mask the overlap of host
# and device, one launch in three on a CPU. So one refusal is reason enough for masks, and a dozen allowed tokens to end
# them.
WEIGHT_OF_TOKEN, AT_FIRST = 0.2, 0.1
FREQUENT, SELDOM = 0.1, 0.02


class Refusals:
    """Share of a request's tokens that its guard has refused of late.

    A refusal loses what is in flight for the request. Where tokens are refused again and again, every draw gets a mask,
    and the request waits for each token: that loses less.
    """

    def __init__(self) -> None:
        self.share = AT_FIRST
        self.are_frequent = False

    def note(self, num_kept: int, *, is_refused: bool) -> None:
        """Note tokens that were allowed, and one after them that was not."""
        self.share *= (1 - WEIGHT_OF_TOKEN) ** num_kept
        if is_refused:
            self.share += WEIGHT_OF_TOKEN * (1 - self.share)
        self.are_frequent = self.share > (SELDOM if self.are_frequent else FREQUENT)

    def most_rounds(self, tokens_per_round: float) -> int:
        """Return after how many rounds the next refusal is expected, at least 1."""
        if self.share <= 0:
            return sys.maxsize
        return max(1, round((1 - self.share) / self.share / tokens_per_round))


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

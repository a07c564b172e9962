"""What rows of a launch do, and what a launch of several rounds may land."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any


class RowKind(enum.Enum):
    """What a row of a launch does."""

    PROMPT_CHUNK = "prompt chunk"  # computes tokens that the host knows; the last chunk samples one
    DECODE = "decode"  # computes the latest token, which is in its seat, and samples the next one
    VERIFICATION = "verification"  # drafts tokens and keeps those that decoding would have sampled
    BLOCK = "block"  # denoises a block of tokens


def _anything(rows: int, pages_per_row: int, shares_lanes: bool) -> bool:
    return True


@dataclass(frozen=True)
class Rounds:
    """A launch of rows that are all in their seats: how many rounds it may run, and what each round lands for a row.

    A sequence that ends lands no more, whatever `least_tokens` says.
    """

    kind: RowKind = RowKind.DECODE
    most: int = 1  # rounds in one launch
    most_tokens: int = 1
    least_tokens: int = 1
    tokens: float = 1.0  # that a round lands for a row, of late
    sits_out: frozenset[Hashable] = frozenset()  # requests that take part again once their tokens have landed
    holds: Callable[[int, int, bool], bool] = _anything  # (rows, pages per row, whether some share lanes)
    most_in_lane: int | None = None  # sequences; None: any number
    plain: Rounds | None = None  # what runs where these cannot, or where no row would draft
    choice: Any = field(default=None, compare=False)  # the strategy's own

    @property
    def takes_prompts(self) -> bool:
        """Whether one round may run beside chunks of prompts; else these go by a plain step, with everybody."""
        return False

    def most_in(self, rounds: int) -> int:
        """The most tokens that so many rounds land for a row."""
        return rounds * self.most_tokens

    def reach(self, known: int, rounds: int, last: int) -> int:
        """How many tokens of a row may be computed in so many rounds.

        Args:
            known: the most tokens that the sequence may have before.
            last: the most that it may come to have; the last one is never computed.
        """
        return min(known + self.most_in(rounds), last) - 1


ONE_STEP = Rounds()  # of plain decoding


@dataclass(frozen=True)
class BlockRounds(Rounds):
    """Rounds that land a block of `most_tokens` where the one before has found its last tokens.

    The block in which a sequence ends may land in the round that finds them: nothing comes after it that would have to
    be counted with.
    """

    kind: RowKind = RowKind.BLOCK
    least_tokens: int = 0

    @property
    def takes_prompts(self) -> bool:
        return True

    def most_in(self, rounds: int) -> int:
        return -(-rounds // 2) * self.most_tokens

    def reach(self, known: int, rounds: int, last: int) -> int:
        """All of the last block is computed, and after a landing the next one is begun."""
        return min(known + (rounds // 2 + 1) * self.most_tokens, last)

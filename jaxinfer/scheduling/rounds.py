"""Kinds of rows in a launch, and rounds: how many a launch may run, and what they may land."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.scheduling.request import Request


class RowKind(enum.Enum):
    """The work of a row in a launch."""

    PROMPT_CHUNK = "prompt chunk"  # computes tokens that the host knows; the last chunk samples one
    DECODE = "decode"  # computes the latest token, which is in its seat, and samples the next one
    VERIFICATION = "verification"  # drafts tokens and keeps those that decoding would have sampled
    BLOCK = "block"  # denoises a block of tokens
    CONSTRAINED_BLOCK = "constrained block"  # draws for a block of which the host commits what a constraint allows


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
    tokens: float = 1.0  # tokens that a round lands for a row, measured of late
    sits_out: frozenset[Hashable] = frozenset()  # requests that take part again once their tokens have landed
    holds: Callable[[int, int, bool], bool] = _anything  # (rows, pages per row, whether some share lanes)
    most_in_lane: int | None = None  # most sequences of a lane; None: any number
    plain: Rounds | None = None  # rounds to run if these cannot, or if no row would draft
    # Rounds of requests with guards, in launches of their own, each of which the host awaits; None: these rounds.
    constrained: ConstrainedRounds | None = None
    choice: Any = field(default=None, compare=False)  # the strategy's own

    @property
    def takes_prompts(self) -> bool:
        """Whether one round may run beside chunks of prompts; else chunks run in a plain step, with all rows."""
        return False

    @property
    def walks_blocks(self) -> bool:
        """Whether the host commits the tokens of blocks, by walks along what was drawn."""
        return False

    def awaits(self, request: Request) -> bool:
        """Whether each draw of a request needs its latest token on the host."""
        return request.draws_alone or (request.guard is not None and self.constrained is not None)

    def most_in(self, rounds: int) -> int:
        """Return the most tokens that so many rounds land for a row."""
        return rounds * self.most_tokens

    def most_computed_in(self, rounds: int) -> int:
        """Return the most tokens after those known before that so many rounds compute for a row."""
        return self.most_in(rounds) - 1  # the last one is computed in the next round

    def reach(self, known: int, rounds: int, last: int) -> int:
        """Return how many tokens of a row may be computed after so many rounds.

        Args:
            known: the most tokens that the sequence may have before.
            last: the most tokens that it may ever have; the last one is never computed.
        """
        return min(known + self.most_computed_in(rounds), last - 1)


ONE_STEP = Rounds()  # of plain decoding


def all_await(running: Sequence[Request], rounds: Rounds) -> bool:
    """Whether each running request that a launch could take needs the host after every token."""
    for request in running:
        decodes = request.in_seat or request.num_computed_tokens == request.num_tokens - 1
        if not request.is_held and not (decodes and rounds.awaits(request)):
            return False
    return True


@dataclass(frozen=True)
class BlockRounds(Rounds):
    """Rounds that land a block of `most_tokens` if the round before has found its last tokens.

    The block in which a sequence ends may land in the round that finds them: nothing follows it that would have to be
    accounted for.
    """

    kind: RowKind = RowKind.BLOCK
    least_tokens: int = 0

    @property
    def takes_prompts(self) -> bool:
        return True

    def most_in(self, rounds: int) -> int:
        return -(-rounds // 2) * self.most_tokens

    def most_computed_in(self, rounds: int) -> int:
        """Count the block that each landing begins."""
        return (rounds // 2 + 1) * self.most_tokens

    def reach(self, known: int, rounds: int, last: int) -> int:
        """Count the whole last block."""
        return min(known + self.most_computed_in(rounds), last)


@dataclass(frozen=True)
class WindowRounds(BlockRounds):
    """Rounds of windows around blocks, a launch of which lands at most one block of `most_tokens`."""

    def most_in(self, rounds: int) -> int:
        return self.most_tokens


@dataclass(frozen=True)
class ConstrainedRounds(BlockRounds):
    """Single rounds of blocks of constrained requests. A round lands at most a block, and the end of the sequence in
    the next one."""

    kind: RowKind = RowKind.CONSTRAINED_BLOCK
    block_size: int = 1
    mask_token_id: int = 0

    @property
    def takes_prompts(self) -> bool:
        return False

    @property
    def walks_blocks(self) -> bool:
        return True

    def most_in(self, rounds: int) -> int:
        return 2 * rounds * self.block_size

"""Walks along the draws of a diffusion block: which of them a constrained request commits, from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxinfer.constraints.automaton import ConstraintError
from jaxinfer.constraints.guard import Guard, GuardState, Walk
from jaxinfer.sampling.greatest import NO_SCORE

NO_SCORE_ERROR = "the model gave no finite score for any token that the constraint allows"


class BlockLimits(NamedTuple):
    """Limits of the blocks of a request."""

    size: int  # tokens of a block
    vocab: int
    mask_token_id: int
    ending_token_ids: frozenset[int]
    max_total_tokens: int  # of prompt and output


@dataclass(frozen=True)
class Block:
    """A block of a constrained request between two rounds: its first tokens are known, the others are masks."""

    start: int  # position of the first token
    tokens: tuple[int, ...]  # the known ones
    num_given: int  # of these, those that had landed before
    state: GuardState  # after the known tokens
    round: int = 0  # rounds that have drawn for the block
    mask: np.ndarray | None = None  # bits of the next place; None: any token is allowed, or no token is left to draw
    forced_at: tuple[int, ...] = ()  # positions of known tokens that were not drawn
    is_last: bool = False  # the sequence ends with the known tokens
    is_complete: bool = False  # the grammar's text ends with them
    error: str | None = None  # why no token may follow them, or why that is unknown

    @property
    def forced(self) -> tuple[int, ...]:
        """Known tokens that were not drawn."""
        return tuple([self.tokens[position - self.start] for position in self.forced_at])


@dataclass(frozen=True)
class BlockWalk(Walk):
    """Result of a walk along the draws of a round.

    `num_kept` counts the draws that were committed, and `state` is the one after the landed tokens. `forced` has those
    of the landed tokens that were not drawn.
    """

    tokens: tuple[int, ...] = ()  # landed tokens
    forced_at: tuple[int, ...] = ()  # positions of those that were not drawn
    num_computed: int = 0  # tokens of the sequence whose keys and values are final
    block: Block | None = None  # where the request continues; None: it has ended
    walked: Block | None = None  # the block after the round

    @property
    def lands(self) -> bool:
        """Whether the walk lands tokens, or ends the request."""
        return bool(self.tokens) or self.block is None


def begin_block(guard: Guard, state: GuardState, start: int, given: Sequence[int], limits: BlockLimits) -> Block:
    """Return the block that begins with landed tokens, and with those that follow in any case.

    Args:
        state: after the given tokens.
        start: position of the first token.
    """
    commits = _Commits(guard, Block(start, tuple(given), len(given), state), limits)
    error = None
    try:
        commits.take_forced()
        return commits.block(0)
    except ConstraintError as raised:
        error = str(raised)
    return replace(commits.so_far(0), error=error)


def walk_block(guard: Guard, block: Block, drawn: Sequence[int], limits: BlockLimits) -> BlockWalk:
    """Walk along the draws of a round, and commit tokens from the leftmost masked place on.

    The token of that place was drawn by the constraint's mask, and is always committed. After it come the draws that
    the unmasking rule would commit too, up to the first that is not allowed, and tokens that follow in any case. A
    block whose tokens were all known before the round lands: its keys and values are final. One with which the sequence
    ends lands at once, because nothing reads its keys and values.

    Args:
        block: as the round found it.
        drawn: for each place the token that was drawn there, if its place is the leftmost masked one or the rule would
            commit it; else -1. `NO_SCORE` in the leftmost masked place: no token could be drawn.
    """
    commits = _Commits(guard, block, limits)
    is_refused, num_kept, round_ = False, 0, block.round
    try:
        if block.error is not None:
            raise ConstraintError(block.error)
        is_final = not commits.has_room
        if not is_final:
            round_ += 1
            num_kept, is_refused = _commit(commits, drawn)
        after = commits.block(round_)
        following = None
        if len(after.tokens) == limits.size and not after.is_last:
            following = begin_block(guard, after.state, after.start + limits.size, (), limits)
    except ConstraintError as error:
        after = commits.so_far(round_)
        landed = after.tokens[block.num_given :]
        return BlockWalk(
            num_kept, after.state, after.forced, is_refused, error=str(error), tokens=landed, forced_at=after.forced_at,
            num_computed=block.start, walked=after,
        )  # fmt: skip
    tokens = after.tokens[block.num_given :]
    if after.is_last:
        return BlockWalk(
            num_kept, after.state, after.forced, is_refused, after.is_complete, tokens=tokens,
            forced_at=after.forced_at, num_computed=block.start, walked=after,
        )  # fmt: skip
    num_computed = block.start + (limits.size if is_final else 0)
    if following is not None and following.is_last:
        # Nothing is drawn any more, so that nothing reads the keys and values of this block either.
        return BlockWalk(
            num_kept, following.state, after.forced + following.forced, is_refused, following.is_complete,
            tokens=tokens + following.tokens, forced_at=after.forced_at + following.forced_at,
            num_computed=num_computed, walked=after,
        )  # fmt: skip
    if is_final:
        return BlockWalk(
            num_kept, after.state, after.forced, tokens=tokens, forced_at=after.forced_at, num_computed=num_computed,
            block=following, walked=after,
        )  # fmt: skip
    return BlockWalk(num_kept, block.state, (), is_refused, num_computed=block.start, block=after, walked=after)


def _commit(commits: _Commits, drawn: Sequence[int]) -> tuple[int, bool]:
    """Commit draws of a round; return how many, and whether the next one was not allowed.

    Raises:
        ConstraintError: nothing could be drawn, or it is unknown what may follow.
    """
    token = drawn[commits.num_known]
    if token == NO_SCORE:
        raise ConstraintError(NO_SCORE_ERROR)
    is_allowed = commits.take(token)
    assert is_allowed, "a token that was drawn with a mask is refused"
    num_kept = 1
    commits.take_forced()
    while commits.has_room and drawn[commits.num_known] >= 0:
        if not commits.take(drawn[commits.num_known]):
            return num_kept, True
        num_kept += 1
        commits.take_forced()
    return num_kept, False


class _Commits:
    """A block while tokens are committed to it, one after the other."""

    def __init__(self, guard: Guard, block: Block, limits: BlockLimits) -> None:
        self._guard, self._block, self._limits = guard, block, limits
        self._tokens, self._forced_at, self._state = list(block.tokens), list(block.forced_at), block.state
        self._is_last, self._is_complete = block.is_last, block.is_complete

    @property
    def num_known(self) -> int:
        return len(self._tokens)

    @property
    def has_room(self) -> bool:
        """Whether a further token may be committed."""
        return not self._is_last and len(self._tokens) < self._limits.size

    def take(self, token: int) -> bool:
        """Commit a token; False, and no change: it is not allowed."""
        after = self._guard.advance(self._state, token)
        if after is None:
            return False
        self._state = after
        self._tokens.append(token)
        self._is_complete = self._guard.is_end(token)
        total = self._block.start + len(self._tokens)
        self._is_last = (
            self._is_complete or token in self._limits.ending_token_ids or total >= self._limits.max_total_tokens
        )
        return True

    def take_forced(self) -> None:
        """Commit the tokens that follow in any case.

        Raises:
            ConstraintError: such a token may not be drawn, or it is unknown what may follow.
        """
        while self.has_room:
            end = self._guard.ends(self._state)
            token = self._guard.forced(self._state) if end is None else end
            if token is None:
                return
            if token == self._limits.mask_token_id or self._guard.excludes(token) or not self.take(token):
                raise ConstraintError(f"the constraint allows token {token} alone next, which may not be drawn")
            self._forced_at.append(self._block.start + len(self._tokens) - 1)

    def so_far(self, round_: int) -> Block:
        """Return the block without a mask."""
        return replace(
            self._block, tokens=tuple(self._tokens), state=self._state, round=round_, mask=None,
            forced_at=tuple(self._forced_at), is_last=self._is_last, is_complete=self._is_complete,
        )  # fmt: skip

    def block(self, round_: int) -> Block:
        """Return the block, with the mask of its next place.

        Raises:
            ConstraintError: it is unknown what may follow.
        """
        mask = self._guard.mask(self._state, self._limits.vocab) if self.has_room else None
        return replace(self.so_far(round_), mask=mask)

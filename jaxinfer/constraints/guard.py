"""Guards: what the output of a request has to keep to, token by token, and walks along drawn tokens.

Tokens are drawn first and looked at afterwards. A walk keeps those that the guard allows. The first that it does not
allow is drawn again with a mask, and what was drawn after it is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.constraints.automaton import ConstraintError, TokenAutomaton
from jaxinfer.sampling.bounds import WORD_BITS, num_words

# Most tokens that one walk appends because nothing else may follow.
MOST_FORCED = 512


class GuardState(NamedTuple):
    """State after some output tokens."""

    of_grammar: Any  # the automaton's state; None: there is no automaton
    tail: tuple[int, ...]  # latest tokens, as many as a banned sequence may begin with


class Guard:
    """A grammar, and token sequences that the output must not contain.

    Args:
        grammar: automaton that the output follows; None: any text.
        bad_sequences: each of at least two tokens.
        eos_token_ids: tokens that end an output of the grammar.
        excluded: tokens that the request may never draw, whatever the grammar says.
    """

    def __init__(
        self,
        grammar: TokenAutomaton[Any] | None,
        bad_sequences: Sequence[Sequence[int]] = (),
        eos_token_ids: Collection[int] = (),
        excluded: Container[int] = (),
    ) -> None:
        self.grammar = grammar
        self._bad = [tuple(sequence) for sequence in bad_sequences]
        self._longest = max([len(sequence) - 1 for sequence in self._bad], default=0)
        self._eos, self._excluded = frozenset(eos_token_ids), excluded
        self.start = GuardState(None if grammar is None else grammar.start, ())

    def advance(self, state: GuardState, token: int) -> GuardState | None:
        """Return the state after a token; None for a token that is not allowed."""
        if self._bad and token in self._barred(state):
            return None
        after = state.of_grammar
        if self.grammar is not None:
            after = self.grammar.advance(after, token)
            if after is None:
                return None
        if not self._longest:
            return GuardState(after, ())
        return GuardState(after, (*state.tail, token)[-self._longest :])

    def along(self, tokens: Sequence[int]) -> GuardState:
        """Return the state after output tokens, all of which are allowed."""
        state = self.start
        for token in tokens:
            after = self.advance(state, token)
            assert after is not None, "the output keeps to its guard"
            state = after
        return state

    def mask(self, state: GuardState, vocab: int) -> np.ndarray | None:
        """Return the tokens that may follow as bits uint32 [W], see `packed_bits`; None: all of `vocab` may."""
        barred = self._barred(state)
        if self.grammar is None:
            if not barred:
                return None
            bits = np.full(num_words(vocab), np.uint32(0xFFFFFFFF))
        else:
            bits = self.grammar.bits(state.of_grammar)
            if not barred:
                return bits
            bits = bits.copy()
        for token in barred:
            bits[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        return bits

    def forced(self, state: GuardState) -> int | None:
        """Return the only token that the grammar allows next, if there is just one and it ends nothing."""
        return None if self.grammar is None else self.grammar.forced(state.of_grammar)

    def ends(self, state: GuardState) -> int | None:
        """Return the token with which an output ends to which nothing can be added; None: more may follow."""
        if self.grammar is None or not self._eos or not self.grammar.ends(state.of_grammar):
            return None
        return min(self._eos)

    def is_end(self, token: int) -> bool:
        """Whether a token that the guard has allowed ends the grammar's text."""
        return self.grammar is not None and token in self._eos

    def excludes(self, token: int) -> bool:
        """Whether the request may never draw a token."""
        return token in self._excluded

    def _barred(self, state: GuardState) -> list[int]:
        """Return the tokens that would complete a banned sequence."""
        tail = state.tail
        return [
            sequence[-1]
            for sequence in self._bad
            if len(tail) >= len(sequence) - 1 and tail[len(tail) - len(sequence) + 1 :] == sequence[:-1]
        ]


@dataclass(frozen=True)
class Walk:
    """Result of a walk."""

    num_kept: int  # tokens that are allowed, from the first on
    state: GuardState  # after these and the forced ones
    forced: tuple[int, ...] = ()  # tokens that follow in any case
    is_refused: bool = False  # whether the token after the kept ones is not allowed
    is_complete: bool = False  # whether the grammar's text ends with these tokens
    mask: np.ndarray | None = None  # bits of what may follow then, if the next draw is to have a mask; None: no mask
    error: str | None = None  # why nothing may follow, or why that is unknown
    was_redrawn: bool = False  # whether a mask has changed the first drawn token
    state_before_forced: GuardState | None = None  # None: there are no forced ones
    num_output_tokens: int = 0  # of the request, the kept ones among them

    @property
    def reenters(self) -> bool:
        """Whether the sequence continues from other tokens than were drawn."""
        return self.is_refused or bool(self.forced)


class WalkLimits(NamedTuple):
    """Limits of a walk."""

    vocab: int  # 0: no mask is made
    ending_token_ids: frozenset[int]
    num_output_tokens: int  # that the request has before
    min_tokens: int
    max_output_tokens: int
    num_in_flight: int  # further tokens that launches may land: a shorter run of forced tokens would not pay
    forces_ends: bool  # whether the token that ends the output may be one of them
    wants_mask: bool  # whether the next draw is to have a mask in any case
    forces: bool = True  # whether tokens that follow in any case are taken without a draw


def walk(guard: Guard, state: GuardState, tokens: Sequence[int], limits: WalkLimits) -> Walk:
    """Walk along drawn tokens from the state before them, up to the first that is refused or ends the output."""
    kept = 0
    try:
        for token in tokens:
            end = guard.ends(state) if limits.forces_ends else None
            if end is not None:
                # Whatever was drawn: of several tokens that end, the same one comes in launches of any size.
                return Walk(kept, state, (end,), is_complete=True, state_before_forced=state)
            after = guard.advance(state, token)
            if after is None:
                break
            state, kept = after, kept + 1
            if guard.is_end(token):
                return Walk(kept, state, is_complete=True)
            count = limits.num_output_tokens + kept
            if (token in limits.ending_token_ids and count > limits.min_tokens) or count >= limits.max_output_tokens:
                return Walk(kept, state)
        is_refused = kept < len(tokens)
        before = state
        forced, state, is_complete = _forced(guard, state, limits, kept, is_refused=is_refused)
        mask = None
        if limits.vocab and not is_complete and (is_refused or forced or limits.wants_mask):
            try:
                mask = guard.mask(state, limits.vocab)
            except ConstraintError:
                if not forced:
                    raise  # else it is for the next walk to say, after these tokens
        return Walk(kept, state, forced, is_refused, is_complete, mask, state_before_forced=before if forced else None)
    except ConstraintError as error:
        return Walk(kept, state, error=str(error))


def _forced(
    guard: Guard, state: GuardState, limits: WalkLimits, kept: int, *, is_refused: bool
) -> tuple[tuple[int, ...], GuardState, bool]:
    """Return the tokens that follow in any case, the state after them, and whether they end the text; none if it pays
    to wait for what is in flight."""
    run: list[int] = []
    after = state
    if not limits.forces:
        return (), state, False
    room = min(MOST_FORCED, limits.max_output_tokens - limits.num_output_tokens - kept - (not limits.forces_ends))
    while len(run) < room:
        try:
            found = _next_forced(guard, after)
        except ConstraintError:
            if run:
                break  # these tokens come before what may not: a stop string may be among them
            raise
        if found is None or (found.ends_text and not limits.forces_ends):
            break
        token = found.token
        if found.ends_text:
            # An end is no run: it saves the launches that would find it.
            return (*run, token), after, True
        ends = token in limits.ending_token_ids and limits.num_output_tokens + kept + len(run) >= limits.min_tokens
        if ends and not limits.forces_ends:
            break
        run.append(token)
        after = found.after
        if ends:
            break
    if is_refused or len(run) > limits.num_in_flight:
        return tuple(run), after, False
    return (), state, False


class _Forced(NamedTuple):
    """The only token that may follow."""

    token: int
    after: GuardState
    ends_text: bool


def _next_forced(guard: Guard, state: GuardState) -> _Forced | None:
    """Return the only token that may follow a state; None: there are several.

    Raises:
        ConstraintError: the request may never draw it, or what may follow cannot be found.
    """
    end = guard.ends(state)
    if end is not None:
        return _Forced(end, state, True)
    token = guard.forced(state)
    if token is None:
        return None
    after = guard.advance(state, token)
    if after is None or guard.excludes(token):
        raise ConstraintError(
            f"the constraint allows token {token} alone next, which allowed_token_ids or bad_words exclude"
        )
    return _Forced(token, after, False)

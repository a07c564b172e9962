"""Several constraints on one output, all of which hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.constraints.automaton import ConstraintError, HostAutomaton, TokenAutomaton, TokenSet
from jaxinfer.sampling.bounds import WORD_BITS


class JoinedAutomaton(HostAutomaton):
    """Product of automata over one vocabulary: a token is allowed where each of them allows it.

    A state is the tuple of their states.

    Args:
        automata: at least one.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, automata: Sequence[TokenAutomaton[Any]]) -> None:
        if not automata:
            raise ValueError("automata must be at least one, got none")
        self._automata = tuple(automata)
        self.start: tuple[Any, ...] = tuple(automaton.start for automaton in self._automata)

    def advance(self, state: tuple[Any, ...], token: int) -> tuple[Any, ...] | None:
        """The states after a token; None for a token that one of the automata does not allow."""
        following = []
        for automaton, part in zip(self._automata, state, strict=True):
            after = automaton.advance(part, token)
            if after is None:
                return None
            following.append(after)
        return tuple(following)

    def bits(self, state: tuple[Any, ...]) -> np.ndarray:
        """The tokens that `advance` takes, as read-only bits uint32 [ceil(vocabulary / 32)].

        Raises:
            ConstraintError: the automata have no token in common, or the bits of one cannot be found.
        """
        parts = [automaton.bits(part) for automaton, part in zip(self._automata, state, strict=True)]
        if len(parts) == 1:
            return parts[0]
        bits = functools.reduce(np.bitwise_and, parts)
        if not bits.any():
            raise ConstraintError(f"no token is allowed by all of {len(parts)} constraints")
        bits.flags.writeable = False
        return bits

    def allowed(self, state: tuple[Any, ...]) -> TokenSet:
        """The tokens that `advance` takes from this state, as a set."""
        size = self._automata[0].allowed(state[0]).size
        return TokenSet.from_bits(self.bits(state), size)

    def is_final(self, state: tuple[Any, ...]) -> bool:
        """Whether the output is complete: all automata say so."""
        return all(automaton.is_final(part) for automaton, part in zip(self._automata, state, strict=True))

    def forced(self, state: tuple[Any, ...]) -> int | None:
        """The only token that may come, if there is exactly one and the output is not complete before it."""
        if self.is_final(state):
            return None
        bits = self.bits(state)
        words = np.flatnonzero(bits)
        word = int(bits[words[0]])
        if words.size != 1 or word.bit_count() != 1:
            return None
        return int(words[0]) * WORD_BITS + word.bit_length() - 1

    def ends(self, state: tuple[Any, ...]) -> bool:
        """Whether nothing but end-of-sequence tokens may come, because one of the automata ends."""
        return any(automaton.ends(part) for automaton, part in zip(self._automata, state, strict=True))

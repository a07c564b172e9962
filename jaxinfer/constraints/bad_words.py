"""Sequences of tokens that an output does not contain, as an automaton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.constraints.automaton import HostAutomaton, TokenSet
from jaxinfer.sampling.bounds import packed_bits

_MOST_KEPT = 64  # sets of tokens


class BadWordsAutomaton(HostAutomaton):
    """Automaton that allows any token but those that complete a banned sequence; implements `TokenAutomaton`.

    A sequence counts only if all of it is in the output. A state is the tuple of the latest tokens of the output, one
    fewer than the longest sequence has. The output is complete everywhere: it says nothing about its end.

    Args:
        sequences: token ids of each banned sequence; a token that is banned alone is a sequence of one.
        size: tokens in the vocabulary.

    Raises:
        ValueError: a sequence is empty, or one of its tokens is not in the vocabulary.
    """

    start: tuple[int, ...] = ()

    def __init__(self, sequences: Sequence[Sequence[int]], size: int) -> None:
        for sequence in sequences:
            if not sequence or not all(0 <= token < size for token in sequence):
                raise ValueError(f"sequences must be non-empty and of tokens below {size}, got {list(sequence)}")
        self._size = size
        self._most = max((len(sequence) - 1 for sequence in sequences), default=0)  # tokens of a state
        self._banned_after: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in sequences:
            self._banned_after.setdefault(tuple(prefix), []).append(last)
        self._lengths = sorted({len(prefix) for prefix in self._banned_after})
        self._kept: dict[frozenset[int], np.ndarray] = {}  # bits without these tokens

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        """The latest tokens after one more; None for one that completes a banned sequence."""
        if not 0 <= token < self._size or token in self._banned(state):
            return None
        return (*state, token)[-self._most :] if self._most else ()

    def bits(self, state: tuple[int, ...]) -> np.ndarray:
        """The tokens that `advance` takes, as read-only bits uint32 [ceil(size / 32)]."""
        banned = self._banned(state)
        bits = self._kept.get(banned)
        if bits is None:
            mask = np.ones(self._size, bool)
            mask[list(banned)] = False
            bits = packed_bits(mask)
            bits.flags.writeable = False
            if len(self._kept) < _MOST_KEPT:
                self._kept[banned] = bits
        return bits

    def allowed(self, state: tuple[int, ...]) -> TokenSet:
        """The tokens that `advance` takes from this state, as a set."""
        return TokenSet.from_bits(self.bits(state), self._size)

    def is_final(self, state: tuple[int, ...]) -> bool:
        """Whether the output may end here: always."""
        return True

    def forced(self, state: tuple[int, ...]) -> int | None:
        """The only token that may come: none is forced, since the output may end."""
        return None

    def ends(self, state: tuple[int, ...]) -> bool:
        """Whether nothing but end-of-sequence tokens may come: never."""
        return False

    def _banned(self, state: tuple[int, ...]) -> frozenset[int]:
        """Tokens that complete a sequence whose others are the latest of the output."""
        found = [
            self._banned_after.get(state[len(state) - length :], ()) for length in self._lengths if length <= len(state)
        ]
        return frozenset(token for tokens in found for token in tokens)

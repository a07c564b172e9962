"""Constrained decoding: automata over tokens, whose states tell which tokens may come next."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np


class ConstraintError(RuntimeError):
    """Error of a constraint that cannot say which tokens may come next: its request ends, with this message."""


class TokenAutomaton[State: Hashable](Protocol):
    """Constraint on the output of requests. Everything is a function of state and token: states of tokens that are not
    kept are simply dropped, and one automaton serves any number of requests."""

    @property
    def start(self) -> State:
        """The state before the first token."""
        ...

    def advance(self, state: State, token: int) -> State | None:
        """The state after a token; None for a token that is not allowed."""
        ...

    def bits(self, state: State) -> np.ndarray:
        """The tokens that `advance` takes, as read-only bits uint32 [ceil(vocabulary / 32)], see `packed_bits`.

        Raises:
            ConstraintError: they cannot be found.
        """
        ...

    def is_final(self, state: State) -> bool:
        """Whether the output is complete: end-of-sequence tokens are allowed."""
        ...

    def forced(self, state: State) -> int | None:
        """The only token that may come, if there is exactly one and it does not end the sequence."""
        ...

    def ends(self, state: State) -> bool:
        """Whether nothing but end-of-sequence tokens may come."""
        ...

"""States of a grammar's automaton, and the parsers that they share along a text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import ref

import numpy as np
from llguidance import LLMatcher

KEPT_DEPTH = 32  # tokens; states after no more are shared by many requests, and have parsers of their own
_MOST_CHILDREN = 64  # of a state, before those that are gone are dropped


class Track:
    """A parser of llguidance and the tokens that it has read. Its methods need its lock, as the parser does.

    A copy takes the longer the more tokens were read. So a state hands its track to the first state after it, and one
    that needs a parser again gets a copy that is rolled back.
    """

    __slots__ = ("lock", "parser", "tokens")

    def __init__(self, parser: LLMatcher, tokens: list[int]) -> None:
        self.parser: LLMatcher | None = parser  # None: it has failed, which nothing undoes
        self.tokens = tokens
        self.lock = threading.Lock()

    def branch(self, depth: int, start: Track) -> Track:
        """Return a new track of the first `depth` tokens; `start` is one that has read none."""
        tokens = self.tokens[:depth]
        if self.parser is not None:
            parser = self.parser.deep_copy()
            if depth == len(self.tokens) or parser.rollback(len(self.tokens) - depth):
                return Track(parser, tokens)
        # Its parser has failed later on: read the tokens again.
        with start.lock:
            assert start.parser is not None and not start.tokens
            parser = start.parser.deep_copy()
        parser.consume_tokens(tokens)
        return Track(parser, tokens)

    def read(self, token: int) -> str | None:
        """Read a token; returns what went wrong, if anything."""
        assert self.parser is not None
        self.tokens.append(token)
        return None if self.parser.consume_token(token) else self.fail()

    def fail(self) -> str:
        """Give the parser up, and return its message."""
        assert self.parser is not None
        message = self.parser.get_error()
        self.parser = None
        return message


class GuidanceState:
    """A state of a `GuidanceAutomaton`, which alone uses its fields; equal to itself only.

    It does not hold the states before it, and those after it weakly: what nothing else refers to is freed.
    """

    __slots__ = ("__weakref__", "bits", "children", "depth", "error", "lock", "num_allowed", "track")

    def __init__(self, track: Track | None, depth: int) -> None:
        self.track = track  # has read its tokens, and maybe more; None: after the end
        self.depth = depth  # tokens
        self.bits: np.ndarray | None = None  # once computed
        self.num_allowed = -1  # tokens whose bit is on, once counted
        self.error: str | None = None  # why there are no bits
        self.children: dict[int, ref[GuidanceState]] = {}  # by token; a WeakValueDictionary takes longer than a step
        self.lock = threading.Lock()

    def child(self, token: int) -> GuidanceState | None:
        """Return the state after a token if there is one; the lock is held."""
        found = self.children.get(token)
        return None if found is None else found()

    def add_child(self, token: int, child: GuidanceState) -> None:
        """Remember the state after a token as long as something else holds it; the lock is held."""
        if len(self.children) >= _MOST_CHILDREN:
            self.children = {token: child for token, child in self.children.items() if child() is not None}
        self.children[token] = ref(child)


class KeptStates:
    """The latest used of states that many requests share, which keep each other's masks that way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: OrderedDict[GuidanceState, None] = OrderedDict()
        self._lock = threading.Lock()

    def use(self, state: GuidanceState) -> None:
        """Keep a state, in place of the one that was used longest ago if there are too many."""
        with self._lock:
            self._states[state] = None
            self._states.move_to_end(state)
            if len(self._states) > self._most:
                self._states.popitem(last=False)

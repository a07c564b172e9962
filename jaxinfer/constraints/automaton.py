"""Constrained decoding: automata over tokens, whose states tell which tokens may come next."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxinfer.constraints.deterministic import LazyAutomaton
from jaxinfer.constraints.regular import Expression
from jaxinfer.constraints.vocabulary import Vocabulary
from jaxinfer.sampling.bounds import packed_bits
from jaxinfer.sampling.constraint import DEAD, NO_BYTES, NUM_OWN_STATES, PADDING, Automaton, AutomatonLimits

_ENDED = -1  # the state after an end-of-sequence token
_MOST_KEPT_IDS = 2**24  # in cached allowed sets, 64 MiB
_MOST_KEPT_BITS = 256  # sets as bits, 4 MiB of them for 128k tokens


class ConstraintError(RuntimeError):
    """Error of a constraint that cannot say which tokens may come next: its request ends, with this message."""


@dataclass(frozen=True, eq=False)
class TokenSet:
    """A set of tokens, stored as the ids in it or the ids not in it, whichever are fewer."""

    ids: np.ndarray  # int32, ascending, read-only
    excludes: bool  # whether the ids are those that are not in the set
    size: int  # tokens in the vocabulary

    @classmethod
    def from_mask(cls, mask: np.ndarray) -> TokenSet:
        """Build the set of the tokens where bool [vocabulary] is true."""
        excludes = 2 * int(np.count_nonzero(mask)) > mask.size
        ids = np.flatnonzero(mask != excludes).astype(np.int32)
        ids.flags.writeable = False
        return cls(ids, excludes, mask.size)

    @classmethod
    def from_bits(cls, bits: np.ndarray, size: int) -> TokenSet:
        """Build the set of the tokens below `size` whose bits are on, uint32 [ceil(size / 32)]; see `packed_bits`."""
        return cls.from_mask(np.unpackbits(_bytes_of(bits), bitorder="little", count=size).astype(bool))

    def mask(self) -> np.ndarray:
        """Return the set as a new array bool [vocabulary]."""
        mask = np.full(self.size, self.excludes)
        mask[self.ids] = not self.excludes
        return mask

    def __contains__(self, token: int) -> bool:
        place = int(np.searchsorted(self.ids, token))
        listed = place < self.ids.size and int(self.ids[place]) == token
        return 0 <= token < self.size and listed != self.excludes

    def __len__(self) -> int:
        return self.size - self.ids.size if self.excludes else self.ids.size


class TokenAutomaton[State: Hashable](Protocol):
    """Constraint on the output of requests. Everything is a function of state and token: states of rejected drafts are
    simply dropped, and one automaton serves any number of requests."""

    @property
    def start(self) -> State:
        """The state before the first token."""
        ...

    def advance(self, state: State, token: int) -> State | None:
        """The state after a token; None for a token that is not allowed."""
        ...

    def allowed(self, state: State) -> TokenSet:
        """The tokens that `advance` takes from this state; never none."""
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

    def on_device(self, limits: AutomatonLimits) -> Automaton | None:
        """Return the whole automaton as host arrays of exactly these sizes; None if it is larger or infinite."""
        ...

    def index_on_device(self, state: State) -> int:
        """Index of a state in these arrays."""
        ...


class HostAutomaton:
    """Base of automata that no device follows: their states are no rows of a table."""

    def on_device(self, limits: AutomatonLimits) -> Automaton | None:
        """Return None: the host follows it."""
        return None

    def index_on_device(self, state: Any) -> int:
        """Refuse: a state has no index.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{type(self).__name__} is followed by the host: no state has an index on the device")


class RegularAutomaton:
    """Automaton that allows tokens whose bytes all continue a text that a regular expression accepts.

    A marker of the expression that is a token is written as that token, which is then allowed nowhere else; other
    special tokens are never allowed. End-of-sequence tokens are allowed where the expression accepts, and
    after themselves. No state is a dead end: every output can be completed with markers and single-byte tokens.

    Args:
        expression: the texts that may be written.
        vocabulary: the tokens that they are written with.
        eos_token_ids: tokens that end an output, at least one.

    Raises:
        ValueError: there are no end-of-sequence tokens, one is not in the vocabulary, or no text can be written.
    """

    def __init__(self, expression: Expression, vocabulary: Vocabulary, eos_token_ids: Iterable[int]) -> None:
        self._eos = frozenset(eos_token_ids)
        if not self._eos or not all(0 <= token < vocabulary.size for token in self._eos):
            raise ValueError(f"eos_token_ids must be tokens below {vocabulary.size}, got {sorted(self._eos)}")
        self._vocabulary = vocabulary
        self._bytes = LazyAutomaton(expression, vocabulary.markers, vocabulary.single_bytes)
        self._no_text = self._eos | self._bytes.marker_tokens
        self._allowed: dict[int, TokenSet] = {}
        self._num_kept_ids = 0
        self._bits: dict[int, np.ndarray] = {}
        self._on_device: Automaton | None = None
        self.start = self._bytes.start

    def advance(self, state: int, token: int) -> int | None:
        """The state after a token; None for a token that is not allowed."""
        if token in self._eos and self.is_final(state):
            return _ENDED
        if state == _ENDED or not 0 <= token < self._vocabulary.size:
            return None
        if token in self._no_text:
            return self._bytes.markers(state).get(token)
        piece = self._vocabulary.pieces[token]
        if not piece:
            return None
        for byte in piece:
            state = self._bytes.step(state, byte)
            if state < 0:
                return None
        return state

    def allowed(self, state: int) -> TokenSet:
        """The tokens that `advance` takes from this state; cached while there is room."""
        found = self._allowed.pop(state, None)
        if found is None:
            found = TokenSet.from_mask(self._find_allowed(state))
            self._num_kept_ids += found.ids.size
        self._allowed[state] = found  # the latest comes last
        while self._num_kept_ids > _MOST_KEPT_IDS and len(self._allowed) > 1:
            self._num_kept_ids -= self._allowed.pop(next(iter(self._allowed))).ids.size
        return found

    def bits(self, state: int) -> np.ndarray:
        """The tokens that `advance` takes, as read-only bits uint32 [ceil(vocabulary / 32)]; the latest are cached."""
        found = self._bits.pop(state, None)
        if found is None:
            found = packed_bits(self.allowed(state).mask())
            found.flags.writeable = False
        self._bits[state] = found  # the latest comes last
        if len(self._bits) > _MOST_KEPT_BITS:
            del self._bits[next(iter(self._bits))]
        return found

    def is_final(self, state: int) -> bool:
        """Whether the output is complete: end-of-sequence tokens are allowed."""
        return state == _ENDED or self._bytes.is_final(state)

    def forced(self, state: int) -> int | None:
        """The only token that may come, if there is exactly one and it does not end the sequence."""
        allowed = self.allowed(state)
        if len(allowed) != 1:
            return None
        token = int(np.flatnonzero(allowed.mask())[0])
        return None if token in self._eos else token

    def ends(self, state: int) -> bool:
        """Whether nothing but end-of-sequence tokens may come."""
        return self.is_final(state) and len(self.allowed(state)) == len(self._eos)

    def on_device(self, limits: AutomatonLimits) -> Automaton | None:
        """Return the automaton as host arrays of exactly these sizes; None if larger. The first call takes 1 to 2 s."""
        if self._on_device is None:
            self._on_device = self._find_on_device(limits)
        return self._on_device

    def index_on_device(self, state: int) -> int:
        """Index of a state in these arrays: the state after the end is last, others are in the order of discovery."""
        return NUM_OWN_STATES + (len(self._bytes.table) if state == _ENDED else state)

    def _find_on_device(self, limits: AutomatonLimits) -> Automaton | None:
        markers = sorted(self._no_text)
        found = self._bytes
        # One state is reserved for the state after the end.
        if len(markers) > limits.num_markers or not found.complete(limits.num_states - NUM_OWN_STATES - 1):
            return None
        states, classes = found.table.shape
        if classes + 2 > limits.num_classes:
            return None
        arrays = Automaton.empty(limits, self._vocabulary.size)
        own = slice(NUM_OWN_STATES, NUM_OWN_STATES + states)
        arrays.class_of_symbol[:256] = found.class_of_byte
        arrays.class_of_symbol[PADDING], arrays.class_of_symbol[NO_BYTES] = classes, classes + 1
        arrays.table[own, :classes] = np.where(found.table < 0, DEAD, found.table + NUM_OWN_STATES)
        arrays.table[:, classes] = np.arange(limits.num_states)
        arrays.marker_of_token[markers] = np.arange(len(markers))
        eos = arrays.marker_of_token[sorted(self._eos)]
        for state in range(states):
            of_state = arrays.after_marker[NUM_OWN_STATES + state]
            for token, following in found.markers(state).items():
                of_state[arrays.marker_of_token[token]] = NUM_OWN_STATES + following
            if found.is_final(state):
                of_state[eos] = self.index_on_device(_ENDED)
        arrays.after_marker[self.index_on_device(_ENDED), eos] = self.index_on_device(_ENDED)
        return arrays

    def _find_allowed(self, state: int) -> np.ndarray:
        mask = np.zeros(self._vocabulary.size, bool)
        if state != _ENDED:
            mask = self._vocabulary.trie.walk(state, self._bytes.steps)
            mask[list(self._no_text)] = False
            mask[list(self._bytes.markers(state))] = True
        if self.is_final(state):
            mask[list(self._eos)] = True
        return mask


def _bytes_of(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits, np.dtype("<u4")).view(np.uint8)

"""Which tokens a constrained sequence may have, and what comes of each: an automaton as tables on the device.

A state is an index. Two mean the same in every automaton: from `FREE` on anything is allowed, for whoever has no
constraint, and `DEAD` is where a token leads that is not allowed. Tokens are read symbol by symbol: the 256 bytes, and
those below that make pieces of all lengths the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FREE, DEAD = 0, 1
NUM_OWN_STATES = 2  # an automaton's own begin behind them
PADDING, NO_BYTES = 256, 257  # symbols: of nothing more; of a token that adds nothing to a text
_NUM_SYMBOLS = 258


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Words:
    """A vocabulary of V tokens, the longest of which has P bytes. Host or device arrays."""

    symbols: Any  # int16 [V, P], padded
    by_length: Any  # int32 [V], tokens, the longest first
    rank: Any  # int32 [V], where each stands in that order
    num_longer: tuple[int, ...] = field(
        metadata={"static": True}
    )  # [P], how many tokens have more than 0, 1, ... bytes

    @classmethod
    def of(cls, pieces: Sequence[bytes | None]) -> Words:
        """Host arrays for what each token adds to a text; None or empty: nothing."""
        lengths = np.asarray([len(piece or b" ") for piece in pieces])
        symbols = np.full((len(pieces), int(lengths.max())), PADDING, np.int16)
        for token, piece in enumerate(pieces):
            symbols[token, : lengths[token]] = list(piece) if piece else NO_BYTES
        by_length = np.argsort(-lengths, kind="stable").astype(np.int32)
        rank = np.empty_like(by_length)
        rank[by_length] = np.arange(len(pieces))
        longer = tuple(int((lengths > place).sum()) for place in range(symbols.shape[1]))
        return cls(symbols, by_length, rank, longer)


class AutomatonLimits(NamedTuple):
    """The sizes of an automaton's arrays, the same for all: programs are compiled before any of them is known."""

    num_states: int = 2**15  # as many as an int16 tells apart
    num_classes: int = 128
    num_markers: int = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Automaton:
    """S states and C classes of symbols that behave alike; M markers: tokens whose bytes do not count."""

    table: Any  # int16 [S, C], the state after a symbol
    class_of_symbol: Any  # int32 [258]
    after_marker: Any  # int16 [S, M]
    marker_of_token: Any  # int32 [V]; M: it is none

    @classmethod
    def empty(cls, limits: AutomatonLimits, vocab_size: int) -> Automaton:
        """Host arrays in which nothing but `FREE` leads anywhere, to be filled in."""
        table = np.full((limits.num_states, limits.num_classes), DEAD, np.int16)
        after_marker = np.full((limits.num_states, limits.num_markers), DEAD, np.int16)
        table[FREE], after_marker[FREE] = FREE, FREE
        classes, markers = np.zeros(_NUM_SYMBOLS, np.int32), np.full(vocab_size, limits.num_markers, np.int32)
        return cls(table, classes, after_marker, markers)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constraint:
    """What programs read: the vocabulary, and the automaton that constrained sequences follow now."""

    words: Words
    automaton: Automaton


def allowed(constraint: Constraint, state: jax.Array) -> jax.Array:
    """bool [N, V]: which tokens lead from states int32 [N] to others than `DEAD`."""
    words, automaton = constraint.words, constraint.automaton
    classes = automaton.class_of_symbol[words.symbols[words.by_length].astype(jnp.int32)]
    states = jnp.broadcast_to(state[:, None], (state.shape[0], words.by_length.shape[0]))
    for place, count in enumerate(words.num_longer):
        after = automaton.table[states[:, :count], classes[:count, place]].astype(jnp.int32)
        states = after if count == states.shape[1] else jnp.concatenate([after, states[:, count:]], axis=1)
    states = jnp.take(states, words.rank, axis=1)
    marker = automaton.marker_of_token
    num_markers = automaton.after_marker.shape[1]
    of_markers = jnp.take(automaton.after_marker[state], jnp.minimum(marker, num_markers - 1), axis=1)
    return jnp.where(marker < num_markers, of_markers, states) != DEAD


def advance(constraint: Constraint, state: jax.Array, token: jax.Array, *, most_bytes: int | None = None) -> jax.Array:
    """int32 [...]: the states after tokens int32 [...] in states int32 [...].

    Args:
        most_bytes: longer tokens lead to `DEAD`, from wherever there is a constraint; None: none is too long.
    """
    words, automaton = constraint.words, constraint.automaton
    token = jnp.clip(token, 0, words.symbols.shape[0] - 1)
    longest = words.symbols.shape[1]
    steps = longest if most_bytes is None else min(longest, most_bytes)
    classes = automaton.class_of_symbol[words.symbols[token].astype(jnp.int32)]
    after = state
    for place in range(steps):
        after = automaton.table[after, classes[..., place]].astype(jnp.int32)
    if steps < longest:
        is_longer = words.symbols[token, steps] != PADDING
        after = jnp.where(is_longer & (state != FREE), DEAD, after)
    marker = automaton.marker_of_token[token]
    num_markers = automaton.after_marker.shape[1]
    of_marker = automaton.after_marker[state, jnp.minimum(marker, num_markers - 1)].astype(jnp.int32)
    return jnp.where(marker < num_markers, of_marker, after)

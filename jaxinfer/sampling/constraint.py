"""Allowed tokens of constrained sequences, and the state after each: an automaton as tables on the device.

A state is an index. Two mean the same in every automaton: `FREE` allows anything, for a sequence without a constraint,
and a token that is not allowed leads to `DEAD`. Tokens are read symbol by symbol: the 256 bytes, and the symbols below,
which pad pieces to one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FREE, DEAD = 0, 1
NUM_OWN_STATES = 2  # an automaton's own states start after them
PADDING, NO_BYTES = 256, 257  # symbols: after the end of a piece; of a token that adds nothing to a text
_NUM_SYMBOLS = 258


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Words:
    """A vocabulary of V tokens, the longest of which has P bytes. Host or device arrays."""

    symbols: Any  # int16 [V, P], padded
    by_length: Any  # int32 [V], tokens, the longest first
    rank: Any  # int32 [V], index of each token in that order
    num_longer: tuple[int, ...] = field(
        metadata={"static": True}
    )  # [P], how many tokens have more than 0, 1, ... bytes

    @classmethod
    def of(cls, pieces: Sequence[bytes | None]) -> Words:
        """Return host arrays for what each token adds to a text; None or empty: nothing."""
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
    """Sizes of an automaton's arrays. All automata have the same: programs are compiled before any is known."""

    num_states: int = 2**15  # as many as an int16 tells apart
    num_classes: int = 128
    num_markers: int = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Automaton:
    """Tables of S states and C classes of symbols that behave alike; M markers: tokens whose bytes do not count."""

    table: Any  # int16 [S, C], the state after a symbol
    class_of_symbol: Any  # int32 [258]
    after_marker: Any  # int16 [S, M]
    marker_of_token: Any  # int32 [V]; M: it is none

    @classmethod
    def empty(cls, limits: AutomatonLimits, vocab_size: int) -> Automaton:
        """Return host arrays, to be filled in, in which every state but `FREE` leads to `DEAD`."""
        table = np.full((limits.num_states, limits.num_classes), DEAD, np.int16)
        after_marker = np.full((limits.num_states, limits.num_markers), DEAD, np.int16)
        table[FREE], after_marker[FREE] = FREE, FREE
        classes, markers = np.zeros(_NUM_SYMBOLS, np.int32), np.full(vocab_size, limits.num_markers, np.int32)
        return cls(table, classes, after_marker, markers)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constraint:
    """Vocabulary, and the automaton that constrained sequences follow now, as programs read them."""

    words: Words
    automaton: Automaton


def allowed(constraint: Constraint, state: jax.Array) -> jax.Array:
    """Return which tokens lead from states int32 [N] to others than `DEAD`, as bool [N, V]."""
    words, automaton = constraint.words, constraint.automaton
    classes = _entries(automaton.class_of_symbol, words.symbols[words.by_length].astype(jnp.int32))
    states = jnp.broadcast_to(state[:, None], (state.shape[0], words.by_length.shape[0]))

    def written_out(states: jax.Array) -> jax.Array:
        # A GPU would ask the host for the end of a loop. Longer tokens come first.
        for place, count in enumerate(words.num_longer):
            after = lax.optimization_barrier(_cells(automaton.table, states[:, :count], classes[:count, place]))
            states = after if count == states.shape[1] else jnp.concatenate([after, states[:, count:]], axis=1)
        return states

    states = lax.platform_dependent(
        states, cpu=lambda states: _in_a_loop(automaton, states, classes), default=written_out
    )
    states = jnp.take(states, words.rank, axis=1, mode="clip")
    num_markers = automaton.after_marker.shape[1]
    marker = automaton.marker_of_token
    of_markers = _cells(automaton.after_marker, state[:, None], jnp.minimum(marker, num_markers - 1))
    return jnp.where(marker < num_markers, of_markers, states) != DEAD


def advance(constraint: Constraint, state: jax.Array, token: jax.Array, *, most_bytes: int | None = None) -> jax.Array:
    """Return the states int32 [...] after tokens int32 [...] in states int32 [...].

    Args:
        most_bytes: longer tokens lead to `DEAD`, except from `FREE`; None: no token is too long.
    """
    words, automaton = constraint.words, constraint.automaton
    token, state = jnp.broadcast_arrays(jnp.clip(token, 0, words.symbols.shape[0] - 1), state)
    state = lax.optimization_barrier(state)
    longest = words.symbols.shape[1]
    steps = longest if most_bytes is None else min(longest, most_bytes)
    symbols = lax.optimization_barrier(words.symbols.at[token].get(mode="clip").astype(jnp.int32))
    classes = lax.optimization_barrier(_entries(automaton.class_of_symbol, symbols))

    def written_out(states: jax.Array) -> jax.Array:
        for place in range(steps):
            states = lax.optimization_barrier(_cells(automaton.table, states, classes[..., place]))
        return states

    after = lax.platform_dependent(
        state, cpu=lambda states: _in_a_loop(automaton, states, classes[..., :steps]), default=written_out
    )
    if steps < longest:
        after = jnp.where((symbols[..., steps] != PADDING) & (state != FREE), DEAD, after)
    num_markers = automaton.after_marker.shape[1]
    marker = _entries(automaton.marker_of_token, token)
    of_marker = _cells(automaton.after_marker, state, jnp.minimum(marker, num_markers - 1))
    return lax.optimization_barrier(jnp.where(marker < num_markers, of_marker, after))


def _in_a_loop(automaton: Automaton, states: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the states [...] after symbols of classes [..., P], whose [...] broadcast."""

    def after_symbol(place: jax.Array, states: jax.Array) -> jax.Array:
        return _cells(automaton.table, states, lax.dynamic_index_in_dim(classes, place, axis=-1, keepdims=False))

    return lax.fori_loop(0, classes.shape[-1], after_symbol, states)


def _entries(table: jax.Array, index: jax.Array) -> jax.Array:
    """Return entries int32 [...] of a table [N]. Indices are in range and read once: a check for negative ones would
    read them twice, and XLA, which fuses a chain of lookups, would compute all that led to them twice."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False).astype(jnp.int32)


def _cells(table: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """Return entries int32 [...] of a table [N, M]."""
    return _entries(table.reshape(-1), row * table.shape[1] + column)

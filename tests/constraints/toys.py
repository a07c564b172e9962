"""Automata whose states are numbers: what they allow looks random, and often they force or end."""

from __future__ import annotations

import functools
from collections.abc import Collection

import numpy as np

from jaxinfer.sampling.bounds import packed_bits

_ENDED = -1
_STATES = 9973


class RandomAutomaton:
    """Allows a random share of the tokens in each state; runs of forced tokens begin at random.

    Args:
        share: of the tokens that a state allows, where it forces none.
        forces: share of the states that allow one token alone.
        ends: share of the states that allow the end, and of these half allow nothing else.
    """

    def __init__(
        self, vocab: int, eos: Collection[int], *, share: float, forces: float = 0.0, ends: float = 0.02, seed: int = 0
    ) -> None:
        self.vocab, self.eos, self.start = vocab, frozenset(eos), seed % _STATES
        self._share, self._forces, self._ends, self._seed = share, forces, ends, seed
        self.mask = functools.cache(self._mask)

    def _mask(self, state: int) -> np.ndarray:
        mask = np.zeros(self.vocab, bool)
        if state != _ENDED:
            rng = np.random.default_rng([self._seed, state])
            ends, forces, ends_alone = rng.random(3)
            mask = rng.random(self.vocab) < self._share
            mask[sorted(self.eos)] = False
            if forces < self._forces or not mask.any():
                mask[:] = False
                mask[rng.choice([token for token in range(self.vocab) if token not in self.eos])] = True
            if ends >= self._ends:
                return mask
            if ends_alone < 0.5:
                mask[:] = False
        mask[sorted(self.eos)] = True
        return mask

    def advance(self, state: int, token: int) -> int | None:
        if not 0 <= token < self.vocab or not self.mask(state)[token]:
            return None
        return _ENDED if token in self.eos else (31 * state + 7 * token + 1) % _STATES

    def bits(self, state: int) -> np.ndarray:
        return packed_bits(self.mask(state))

    def is_final(self, state: int) -> bool:
        return bool(self.mask(state)[sorted(self.eos)].any())

    def forced(self, state: int) -> int | None:
        found = np.flatnonzero(self.mask(state))
        return int(found[0]) if len(found) == 1 and int(found[0]) not in self.eos else None

    def ends(self, state: int) -> bool:
        return set(np.flatnonzero(self.mask(state)).tolist()) <= self.eos


class Turns(RandomAutomaton):
    """Allows few tokens for a draw or two, then any tokens but the end for `gap` draws, and so on; ends nothing."""

    def __init__(self, vocab: int, eos: Collection[int], *, gap: int, num_tight: int = 2) -> None:
        super().__init__(vocab, eos, share=0.02, ends=0.0)
        self._gap, self._num_tight = gap, num_tight

    def _mask(self, state: int) -> np.ndarray:
        if state % (self._gap + self._num_tight) < self._num_tight:
            return super()._mask(state)
        mask = np.ones(self.vocab, bool)
        mask[sorted(self.eos)] = False
        return mask

    def advance(self, state: int, token: int) -> int | None:
        return state + 1 if self.mask(state)[token] else None


def automata(vocab: int, eos: int, *, seed_of_runs: int = 4) -> tuple[RandomAutomaton, ...]:
    """Return four: that allows most tokens, half of them, few of them, and that forces long runs of tokens."""
    return (
        RandomAutomaton(vocab, [eos], share=0.9, seed=1),
        RandomAutomaton(vocab, [eos], share=0.5, forces=0.05, seed=2),
        RandomAutomaton(vocab, [eos], share=0.05, forces=0.3, ends=0.04, seed=3),
        RandomAutomaton(vocab, [eos], share=0.6, forces=0.85, ends=0.01, seed=seed_of_runs),
    )

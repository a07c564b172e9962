"""Random choices on the host: three independent streams made of one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

# How far a distribution's sum may be from 1.
SUM_TOLERANCE = 1e-6


class RandomChoices(Protocol):
    """The two choices that generation makes."""

    def token(self, probabilities: np.ndarray) -> int:
        """A token id with the probabilities [V], which sum to 1; never one of probability 0."""
        ...

    def accepts(self, probability: float) -> bool:
        """True with this probability: never for 0, always for 1."""
        ...


class RandomStream:
    """`RandomChoices` of a generator with this seed, integers of at least 0; each takes one uniform number of it."""

    def __init__(self, seed: Sequence[int]) -> None:
        self._generator = np.random.default_rng(seed)

    def token(self, probabilities: np.ndarray) -> int:
        """By the inverse of the cumulated distribution.

        Raises:
            ValueError: they do not sum to 1.
        """
        below = np.cumsum(probabilities)
        total = below[-1]
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ValueError(f"probabilities must sum to 1, got a sum of {total}")
        found = np.searchsorted(below, self._generator.random() * total, side="right")
        return int(min(found, np.flatnonzero(probabilities)[-1]))

    def accepts(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)


@dataclass(frozen=True)
class Streams:
    """What is drawn for drafts, for their acceptance and for the tokens that the target adds.

    They must be independent of each other: a uniform number that chose a draft says something about the draft, and one
    that rejected it says something about the ratio; used again, either biases the output.
    """

    draft: RandomChoices
    acceptance: RandomChoices
    final: RandomChoices  # first tokens, residuals, bonus tokens and plain tokens

    @classmethod
    def of(cls, key: jax.Array) -> Streams:
        """Made of a jax.random key.

        Raises:
            ValueError: it is not a key, or several.
        """
        try:
            seeds = np.asarray(jax.random.key_data(jax.random.split(key, 3)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"key must be one jax.random key, got {key!r}") from error
        return cls(*(RandomStream(seed.tolist()) for seed in seeds))

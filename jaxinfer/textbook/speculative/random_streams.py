"""Random choices on the host: three independent streams from one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

# Allowed difference of a distribution's sum from 1.
SUM_TOLERANCE = 1e-6


class RandomChoices(Protocol):
    """The two random choices of generation."""

    def token(self, probabilities: np.ndarray) -> int:
        """Draw a token id with the probabilities [V], which sum to 1; never one of probability 0."""
        ...

    def accepts(self, probability: float) -> bool:
        """Return True with this probability: never for 0, always for 1."""
        ...

    @property
    def latest(self) -> float | None:
        """The uniform number in [0, 1) that the latest choice took; None where choices take none."""
        ...


class RandomStream:
    """`RandomChoices` from a generator seeded with integers of at least 0; each choice takes one uniform number."""

    def __init__(self, seed: Sequence[int]) -> None:
        self._generator = np.random.default_rng(seed)
        self.latest: float | None = None

    def token(self, probabilities: np.ndarray) -> int:
        """Draw a token id by the inverse of the cumulative distribution.

        Raises:
            ValueError: the probabilities do not sum to 1.
        """
        below = np.cumsum(probabilities)
        total = below[-1]
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ValueError(f"probabilities must sum to 1, got a sum of {total}")
        found = np.searchsorted(below, self._uniform() * total, side="right")
        return int(min(found, np.flatnonzero(probabilities)[-1]))

    def accepts(self, probability: float) -> bool:
        return self._uniform() < probability

    def _uniform(self) -> float:
        self.latest = float(self._generator.random())
        return self.latest


@dataclass(frozen=True)
class Streams:
    """Random streams for drafts, for their acceptance and for the tokens that the target adds.

    They must be independent of each other. A uniform number that chose a draft depends on the draft, and one that
    rejected it depends on the ratio; used again, either biases the output.
    """

    draft: RandomChoices
    acceptance: RandomChoices
    final: RandomChoices  # first tokens, residuals, bonus tokens and plain tokens

    @classmethod
    def of(cls, key: jax.Array) -> Streams:
        """Make the three streams from one jax.random key.

        Raises:
            ValueError: `key` is not a single key.
        """
        try:
            seeds = np.asarray(jax.random.key_data(jax.random.split(key, 3)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"key must be one jax.random key, got {key!r}") from error
        return cls(*(RandomStream(seed.tolist()) for seed in seeds))

"""Entropy-adaptive draft lengths (EGAG): an uncertain drafter drafts less."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

type EntropyScale = Literal["vocabulary", "running"] | float


def check_entropy_scale(scale: EntropyScale) -> None:
    """Raise ValueError unless `scale` is one of the two words or a number in (0, 1]."""
    if isinstance(scale, str):
        is_known = scale in ("vocabulary", "running")
    else:
        is_known = isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale <= 1
    if not is_known:
        raise ValueError(f"entropy_scale must be 'vocabulary', 'running' or a number in (0, 1], got {scale!r}")


@dataclass(frozen=True)
class EntropyReading:
    """Result of one observation."""

    normalised: float  # entropy / ln V, in [0, 1]
    smoothed: float  # h: the normalised entropy, rescaled and averaged, in [0, 1]
    gamma: int


class EntropyGamma:
    """Number of drafts that falls linearly with the drafter's entropy.

    The source normalises the entropy H of the drafter's distribution, in nats, by its greatest value, ln V:

        e = H / ln V,    s = min(1, e / scale),    h = beta h + (1 - beta) s  (the first s at first),
        gamma = gamma_max - (gamma_max - gamma_min) h,  rounded half up and held within [gamma_min, gamma_max].

    With "vocabulary", the source's rule, `scale` is 1. Language models have e of 0.05 to 0.3, so gamma hardly falls
    then: a number says which e counts as uncertain, and "running" is the greatest e observed so far. With that, a
    drafter of constant entropy always drafts `gamma_min`.

    Args:
        vocab_size: V, at least 2.
        gamma_min: drafts of an uncertain drafter, at least 1.
        gamma_max: drafts of a certain drafter.
        ema_beta: weight of the past, in [0, 1).
        scale: the e that counts as uncertain: "vocabulary", "running" or a number in (0, 1].
    """

    def __init__(
        self,
        vocab_size: int,
        gamma_min: int,
        gamma_max: int,
        ema_beta: float = 0.0,
        scale: EntropyScale = "vocabulary",
    ) -> None:
        if not vocab_size >= 2:
            raise ValueError(f"vocab_size must be at least 2, got {vocab_size!r}")
        if not 1 <= gamma_min <= gamma_max:
            raise ValueError(f"gamma_min must be from 1 to gamma_max ({gamma_max!r}), got {gamma_min!r}")
        if not 0 <= ema_beta < 1:
            raise ValueError(f"egag_ema_beta must be in [0, 1), got {ema_beta!r}")
        check_entropy_scale(scale)
        self.gamma_min, self.gamma_max = gamma_min, gamma_max
        self._most = math.log(vocab_size)
        self._beta = ema_beta
        self._scale = 1.0 if scale == "vocabulary" else None if scale == "running" else float(scale)
        self._greatest = 0.0
        self._smoothed: float | None = None

    def observe(self, entropy: float) -> EntropyReading:
        """Return the draft length after one more entropy in nats, which is clipped to [0, ln V]."""
        normalised = min(max(entropy / self._most, 0.0), 1.0)
        self._greatest = max(self._greatest, normalised)
        scale = self._greatest if self._scale is None else self._scale
        # A scale of 0 means that every entropy was 0: the drafter is certain.
        share = min(1.0, normalised / scale) if scale > 0 else 0.0
        before = share if self._smoothed is None else self._smoothed
        self._smoothed = self._beta * before + (1 - self._beta) * share
        length = self.gamma_max - (self.gamma_max - self.gamma_min) * self._smoothed
        gamma = min(max(round_half_up(length), self.gamma_min), self.gamma_max)
        return EntropyReading(normalised, self._smoothed, gamma)


def entropy_of(probabilities: np.ndarray) -> float:
    """Return the entropy of probabilities [V] in nats; a token of probability 0 adds nothing."""
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def round_half_up(value: float) -> int:
    """Return the nearest integer; of two equally near ones the greater (Python's `round` takes the even one)."""
    return math.floor(value + 0.5)

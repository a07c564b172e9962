"""Logits processors, which turn logits into distributions: greedy, multinomial, top-k, nucleus."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxinfer.textbook.speculative.random_streams import RandomChoices


@dataclass(frozen=True)
class LogitsProcessor(ABC):
    """Function from logits to probabilities, which drafter and target share. Logits are not modified.

    A subclass is written in one of two ways. As the source has it, `_process` filters logits and returns logits; the
    temperature and the softmax apply after it. With `returns_probabilities = True` in its body, `_process` gets logits
    that have been divided by the temperature, and returns probabilities: the processors of this module do that, so
    their filters see the distribution that is sampled.

    Args:
        temperature: logits are divided by it; above 0, see `GreedyProcessor` for its limit.
    """

    temperature: float
    returns_probabilities: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # It describes `_process`, so it is not inherited by a class that has another one.
        if "_process" in vars(cls) and "returns_probabilities" not in vars(cls):
            cls.returns_probabilities = False

    def __post_init__(self) -> None:
        if not (_is_real(self.temperature) and 0 < self.temperature < math.inf):
            raise ValueError(
                f"temperature must be a finite number above 0 (GreedyProcessor for 0), got {self.temperature!r}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is deterministic."""
        return False

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return probabilities float64 [..., V] of logits [..., V].

        Raises:
            ValueError: `_process` returns probabilities and its class does not say so.
        """
        logits = np.array(logits, np.float64)
        if self.returns_probabilities:
            return self._process(self._divided(logits))
        filtered = np.asarray(self._process(logits), np.float64)
        if (filtered >= 0).all() and np.allclose(filtered.sum(axis=-1), 1.0, rtol=0.0, atol=1e-6):
            name = type(self).__name__
            raise ValueError(
                f"{name}._process returns probabilities: set returns_probabilities = True in {name}, or return logits"
            )
        return softmax(self._divided(filtered))

    def beliefs(self, logits: np.ndarray) -> np.ndarray:
        """Return what a debug view shows of logits [..., V]: float64 [..., V], the probabilities that are sampled.

        Of greedy decoding, which gives one token all of it, the softmax of the logits.
        """
        return self(logits)

    def _divided(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits divided by the temperature, the greatest of each row being 0."""
        # Subtract before dividing: the most likely token weighs 1 however small the temperature is.
        return (logits - logits.max(axis=-1, keepdims=True)) / self.temperature

    @abstractmethod
    def _process(self, logits: np.ndarray) -> np.ndarray:
        """Return filtered logits [..., V], or probabilities, see the class."""

    def sample(self, probabilities: np.ndarray, choices: RandomChoices) -> int:
        """Draw a token id from the processed probabilities [V]."""
        return choices.token(probabilities)


@dataclass(frozen=True)
class GreedyProcessor(LogitsProcessor):
    """Processor that gives the most likely token probability 1, ties to the lowest id: speculation then tests equality.

    The temperature has no effect.
    """

    returns_probabilities: ClassVar[bool] = True

    temperature: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return True

    def beliefs(self, logits: np.ndarray) -> np.ndarray:
        return softmax(self._divided(np.asarray(logits, np.float64)))

    def _process(self, logits: np.ndarray) -> np.ndarray:
        best = logits.argmax(axis=-1)
        return (np.arange(logits.shape[-1]) == best[..., None]).astype(np.float64)


@dataclass(frozen=True)
class MultinomialProcessor(LogitsProcessor):
    """Processor for plain sampling: softmax(logits / temperature)."""

    returns_probabilities: ClassVar[bool] = True

    def _process(self, logits: np.ndarray) -> np.ndarray:
        return softmax(logits)


@dataclass(frozen=True)
class TopKProcessor(MultinomialProcessor):
    """Processor that keeps the `top_k` most likely tokens; ties go to the lower ids.

    Args:
        top_k: at least 1; more than the vocabulary keeps all tokens.
    """

    returns_probabilities: ClassVar[bool] = True

    top_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_top_k(self.top_k)

    def _process(self, logits: np.ndarray) -> np.ndarray:
        return _top_k(softmax(logits), self.top_k)


@dataclass(frozen=True)
class NucleusProcessor(MultinomialProcessor):
    """Processor that keeps the most likely tokens until their probabilities reach `top_p`, the crossing one included.

    Nucleus sampling is from Holtzman et al. 2019, "The curious case of neural text degeneration".

    Args:
        top_p: in (0, 1].
    """

    returns_probabilities: ClassVar[bool] = True

    top_p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_top_p(self.top_p)

    def _process(self, logits: np.ndarray) -> np.ndarray:
        return _nucleus(softmax(logits), self.top_p)


@dataclass(frozen=True)
class TopKNucleusProcessor(MultinomialProcessor):
    """Processor that applies the filter of `TopKProcessor`, renormalises, and applies that of `NucleusProcessor`."""

    returns_probabilities: ClassVar[bool] = True

    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_top_k(self.top_k)
        _check_top_p(self.top_p)

    def _process(self, logits: np.ndarray) -> np.ndarray:
        return _nucleus(_top_k(softmax(logits), self.top_k), self.top_p)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities float64 [..., V] of logits [..., V]."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def most_likely_first(scores: np.ndarray) -> np.ndarray:
    """Return token ids [..., V] in descending order of their scores; ties in the order of the ids."""
    return np.argsort(-scores, axis=-1, kind="stable")


def _top_k(probabilities: np.ndarray, top_k: int) -> np.ndarray:
    kept = np.zeros(probabilities.shape, bool)
    np.put_along_axis(kept, most_likely_first(probabilities)[..., :top_k], True, axis=-1)
    return _renormalised(probabilities, kept)


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    if top_p >= 1:
        return probabilities
    order = most_likely_first(probabilities)
    descending = np.take_along_axis(probabilities, order, axis=-1)
    before = np.cumsum(descending, axis=-1) - descending
    kept = np.zeros(probabilities.shape, bool)
    np.put_along_axis(kept, order, before < top_p, axis=-1)
    return _renormalised(probabilities, kept)


def _renormalised(probabilities: np.ndarray, kept: np.ndarray) -> np.ndarray:
    held = np.where(kept, probabilities, 0.0)
    return held / held.sum(axis=-1, keepdims=True)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _check_top_k(top_k: object) -> None:
    if not (isinstance(top_k, int | np.integer) and not isinstance(top_k, bool) and top_k >= 1):
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k!r}")


def _check_top_p(top_p: Any) -> None:
    if not (_is_real(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be a number in (0, 1], got {top_p!r}")

"""Which of a block's masked tokens a round commits.

Every rule commits at least one token of a block that has any masked, so that a block of B tokens takes B rounds at
most. Of equal confidences the one further left is the greater.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.diffusion.config import DiffusionConfig

# How far below the most confident token of a row another one still counts as equally confident (dInfer).
_TIE = 1e-5


class UnmaskRule(Protocol):
    """A pure function of what a round found; hashable, because programs are compiled for it."""

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        """bool [R, B]: what is committed.

        Args:
            confidence: float32 [R, B], the probability of the token that was drawn at each place.
            masked: bool [R, B], the places that have no token yet.
            least: float32 [R], what a threshold is at least in this round; None: 0.
        """
        ...


@dataclass(frozen=True)
class Threshold:
    """Whatever is at least `threshold` sure, or else as sure as the surest (dInfer's `ThresholdParallelDecoder`)."""

    threshold: float

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        held = jnp.where(masked, confidence, -jnp.inf)
        bound = jnp.minimum(_raised(self.threshold, least), jnp.max(held, axis=1, keepdims=True) - _TIE)
        return masked & (held >= bound)


@dataclass(frozen=True)
class Credit(Threshold):
    """The same, where a token that was the likeliest of its place in rounds before is likelier (dInfer's
    `CreditThresholdParallelDecoder`). Credits belong to one block of one sequence."""

    alpha: float
    gamma: float
    beta: float

    def credited(self, credits: jax.Array, logits: jax.Array, masked: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The credits after a round and the logits that it draws from, float32 [N, vocab] both.

        Args:
            credits: those of the round before; 0 in a block's first one.
            logits: float32 [N, vocab], the model's own.
            masked: bool [N], places that have no token yet; no others get any credit.
        """
        top = jnp.argmax(logits, axis=-1)
        probability = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
        more = jnp.where(masked, probability**self.gamma, 0.0)
        credits = (credits * self.beta).at[jnp.arange(len(top)), top].add(more)
        return credits, logits + self.alpha * jnp.log1p(credits)


@dataclass(frozen=True)
class Hierarchy:
    """Whatever is more than `threshold` sure; of every run of masks the surest, if it is more than `low_threshold`
    sure; and the surest of all (dInfer's `HierarchyDecoder`)."""

    threshold: float
    low_threshold: float

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        held = jnp.where(masked, confidence, -jnp.inf)
        place = jnp.arange(masked.shape[1])
        # Two places are of one run if no token stands between them: each run has the number of tokens before it.
        run = jnp.cumsum(~masked, axis=1)
        same = (run[:, :, None] == run[:, None, :]) & masked[:, None, :]
        beaten = (held[:, None, :] > held[:, :, None]) | (
            (held[:, None, :] == held[:, :, None]) & (place[None, None, :] < place[None, :, None])
        )
        best_of_run = masked & ~jnp.any(same & beaten, axis=2)
        surest = masked & (place == jnp.argmax(held, axis=1)[:, None])
        return (masked & (held > _raised(self.threshold, least))) | (best_of_run & (held > self.low_threshold)) | surest


@dataclass(frozen=True)
class Factor:
    """The surest ones, as long as the nth of them is at least 1 - factor / (n + 1) sure; the first in any case
    (Fast-dLLM's factor rule)."""

    factor: float

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        held = jnp.where(masked, confidence, -jnp.inf)
        order = jnp.argsort(-held, axis=1, stable=True)
        sorted_ = jnp.take_along_axis(held, order, axis=1)
        nth = jnp.arange(1, masked.shape[1] + 1)
        passes = (sorted_ >= 1.0 - self.factor / (nth + 1)) | (nth == 1)
        kept = lax.cumprod((passes & (sorted_ > -jnp.inf)).astype(jnp.int32), axis=1) > 0
        rows = jnp.arange(masked.shape[0])[:, None]
        return jnp.zeros_like(masked).at[rows, order].set(kept) & masked


def rule_of(config: DiffusionConfig) -> UnmaskRule:
    """Which tokens a round commits."""
    match config.unmask:
        case "threshold":
            return Threshold(config.threshold)
        case "hierarchy":
            return Hierarchy(config.threshold, config.low_threshold)
        case "factor":
            return Factor(config.factor)
        case _:
            return Credit(config.threshold, config.credit_alpha, config.boost_gamma, config.decay_beta)


def _raised(threshold: float, least: jax.Array | None) -> float | jax.Array:
    """A rule's threshold in this round, for each row."""
    return threshold if least is None else jnp.maximum(threshold, least)[:, None]

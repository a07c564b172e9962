"""Rules that choose which of a block's masked tokens a round commits.

Every rule commits at least one token of a block that has a mask, so that a block of B tokens takes at most B rounds.
Of equal confidences, the leftmost counts as the greatest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.diffusion.config import DiffusionConfig

# Distance from a row's greatest confidence within which another one counts as equal (dInfer).
_TIE = 1e-5


class UnmaskRule(Protocol):
    """A pure function of a round's results; hashable, because programs are compiled for it."""

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        """Return the places to commit, bool [R, B].

        Args:
            confidence: float32 [R, B], the probability of the token that was drawn at each place.
            masked: bool [R, B], the places that have no token yet.
            least: float32 [R], lower bound of the rule's threshold in this round; None: 0.
        """
        ...


@dataclass(frozen=True)
class Threshold:
    """Commits confidences of at least `threshold`, or else the greatest (dInfer's `ThresholdParallelDecoder`)."""

    threshold: float

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        held = jnp.where(masked, confidence, -jnp.inf)
        bound = jnp.minimum(_raised(self.threshold, least), jnp.max(held, axis=1, keepdims=True) - _TIE)
        return masked & (held >= bound)


@dataclass(frozen=True)
class Credit(Threshold):
    """The `Threshold` rule over logits in which a place's top tokens of earlier rounds are likelier (dInfer's
    `CreditThresholdParallelDecoder`). Credits belong to one block of one sequence."""

    alpha: float
    gamma: float
    beta: float

    def credited(self, credits: jax.Array, logits: jax.Array, masked: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the credits after a round and the logits that it draws from, both float32 [N, vocab].

        Args:
            credits: credits after the previous round; 0 in a block's first round.
            logits: float32 [N, vocab], the model's logits.
            masked: bool [N], places that have no token yet; only these gain credit.
        """
        top = jnp.argmax(logits, axis=-1)
        probability = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
        more = jnp.where(masked, probability**self.gamma, 0.0)
        credits = (credits * self.beta).at[jnp.arange(len(top)), top].add(more)
        return credits, logits + self.alpha * jnp.log1p(credits)


@dataclass(frozen=True)
class Hierarchy:
    """Commits confidences above `threshold`, the greatest of every run of masks if it is above `low_threshold`, and the
    greatest of all (dInfer's `HierarchyDecoder`)."""

    threshold: float
    low_threshold: float

    def __call__(self, confidence: jax.Array, masked: jax.Array, least: jax.Array | None = None) -> jax.Array:
        held = jnp.where(masked, confidence, -jnp.inf)
        place = jnp.arange(masked.shape[1])
        # A run is numbered by the tokens before it: two masks with no token between them are in one run.
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
    """Commits the greatest confidences, while the nth is at least 1 - factor / (n + 1); always the first (Fast-dLLM's
    factor rule)."""

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
    """Return the rule that a configuration asks for."""
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
    """Return a rule's threshold in this round, for each row."""
    return threshold if least is None else jnp.maximum(threshold, least)[:, None]

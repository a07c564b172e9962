"""Decides whether a sampler draws from the distribution that it should, at a fixed rate of false alarms."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2

from jaxinfer.sampling.sampler import SamplingBatch
from tests.sampling.reference import Filters, probabilities_of, sampling_batch

# A right sampler fails one check in a million; the seeds are fixed, so a check that passes once passes always.
FALSE_ALARM_RATE = 1e-6
DRAWS = 16384

Sampler = Callable[[jax.Array, SamplingBatch], jax.Array]


class WrongDistributionError(AssertionError):
    """The draws are not those of the distribution asked for."""


def check_draws(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Compare draws with exact probabilities [V]: nothing outside the kept set, and Pearson's chi-square inside.

    Raises:
        WrongDistributionError: says which of the two failed.
    """
    counts = np.bincount(tokens, minlength=len(probabilities))
    stray = np.flatnonzero((counts > 0) & (probabilities == 0))
    if len(counts) > len(probabilities) or len(stray):
        raise WrongDistributionError(f"tokens that are not kept were drawn: {stray[:10].tolist()}")
    expected = probabilities * len(tokens)
    # The chance that a kept token is never drawn is exp(-expected).
    missing = np.flatnonzero((counts == 0) & (expected > -np.log(FALSE_ALARM_RATE / len(probabilities))))
    if len(missing):
        raise WrongDistributionError(f"tokens that are kept were never drawn: {missing[:10].tolist()}")
    # Rare tokens share bins of at least 5 expected draws: below that the chi-square approximation is poor.
    bins = np.where(expected >= 5, np.cumsum(expected >= 5), 0)
    rare = np.cumsum(np.where(expected < 5, expected, 0.0))
    bins = np.where(expected < 5, -np.minimum(rare // 5, max(rare[-1] // 5 - 1, 0)) - 1, bins)
    _, bins = np.unique(bins, return_inverse=True)
    observed, wanted = (np.bincount(bins, weights=values) for values in (counts, expected))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(observed) == 1:
        return
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    if chi2.sf(statistic, len(observed) - 1) < FALSE_ALARM_RATE:
        raise WrongDistributionError(f"chi-square is {statistic:.1f} with {len(observed) - 1} degrees of freedom")


def check_sampler(sampler: Sampler, logits: np.ndarray, filters: Filters, *, draws: int = DRAWS) -> None:
    """Draw from one row of logits [V] at `draws` positions at once and compare with `probabilities_of`."""
    tiled = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    tokens = np.asarray(sampler(tiled, sampling_batch([filters], repeat=draws)))
    check_draws(tokens, probabilities_of(logits, filters))

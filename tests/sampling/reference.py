"""What sampling means, in a few lines of numpy: which tokens are kept, and with which probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.sampler import SamplingBatch


@dataclass(frozen=True)
class Filters:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


Step = Callable[[np.ndarray, Filters], np.ndarray]


def keep(probabilities: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The probabilities of the kept tokens, renormalised; `kept` is a mask or holds token ids."""
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()


def most_likely_first(probabilities: np.ndarray) -> np.ndarray:
    """Token ids; ties in the order of the ids."""
    return np.argsort(-probabilities, kind="stable")


def temperature(probabilities: np.ndarray, filters: Filters) -> np.ndarray:
    scaled = probabilities ** (1 / filters.temperature)
    return scaled / scaled.sum()


def top_k(probabilities: np.ndarray, filters: Filters) -> np.ndarray:
    if filters.top_k <= 0:
        return probabilities
    return keep(probabilities, most_likely_first(probabilities)[: filters.top_k])


def top_p(probabilities: np.ndarray, filters: Filters) -> np.ndarray:
    if filters.top_p >= 1:
        return probabilities
    order = most_likely_first(probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    # A case whose cumulative mass equals top_p would test rounding, not the filter.
    assert np.abs(before - filters.top_p).min() > 1e-5, "choose another top_p for this case"
    return keep(probabilities, order[before < filters.top_p])


def min_p(probabilities: np.ndarray, filters: Filters) -> np.ndarray:
    return keep(probabilities, probabilities >= filters.min_p * probabilities.max())


STEPS: tuple[Step, ...] = (temperature, min_p, top_k, top_p)


def probabilities_of(logits: np.ndarray, filters: Filters, steps: Sequence[Step] = STEPS) -> np.ndarray:
    """float64 [V]: the distribution that a row with these logits [V] must be sampled from."""
    result = np.exp(logits.astype(np.float64) - logits.max())
    result /= result.sum()
    for step in steps:
        result = step(result, filters)
    return result


def sampling_batch(
    rows: Sequence[Filters],
    *,
    repeat: int = 1,
    keys: np.ndarray | None = None,
    positions: Sequence[int] | np.ndarray | None = None,
) -> SamplingBatch:
    """Device arrays for rows of parameters, each row `repeat` times.

    Keys [Q, 2] default to one key for all, positions [Q] to 0, 1, 2, ....
    """
    count = repeat * len(rows)
    columns = (np.repeat([getattr(row, name) for row in rows], repeat) for name in Filters.__dataclass_fields__)
    temperatures, top_ks, top_ps, min_ps = columns
    return SamplingBatch(
        temperature=jnp.asarray(temperatures, jnp.float32),
        top_k=jnp.asarray(top_ks, jnp.int32),
        top_p=jnp.asarray(top_ps, jnp.float32),
        min_p=jnp.asarray(min_ps, jnp.float32),
        request_key=jnp.asarray(np.tile([17, 4], (count, 1)) if keys is None else keys, jnp.uint32),
        sample_position=jnp.asarray(np.arange(count) if positions is None else positions, jnp.int32),
    )


def adjusted(
    logits: np.ndarray,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
    biases: Mapping[int, float] | None = None,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
) -> np.ndarray:
    """float64 [V]: logits [V] after allowed set, biases (-inf bans), repetition, frequency and presence penalties."""
    result = logits.astype(np.float64)
    if allowed is not None:
        result[[token for token in range(len(result)) if token not in allowed]] = -np.inf
    for token, bias in (biases or {}).items():
        result[token] += bias
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in output:
        result[token] -= frequency
    for token in set(output):
        result[token] -= presence
    return result


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., V]: log probabilities of logits [..., V]."""
    below_top = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return below_top - np.log(np.exp(below_top).sum(axis=-1, keepdims=True))

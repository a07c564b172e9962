"""The checker accepts a right sampler and rejects every wrong one that is planted here."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from jaxinfer.sampling.sampler import SamplingBatch
from jaxinfer.sampling.sampler import uniforms as device_uniforms
from tests.sampling import reference
from tests.sampling.cases import LOGITS, SMALL
from tests.sampling.checker import WrongDistributionError, check_sampler
from tests.sampling.reference import STEPS, Filters, Step, keep, most_likely_first, probabilities_of

VOCAB = 50
uniforms = jax.jit(device_uniforms)


def make_sampler(
    steps: Sequence[Step] = STEPS, warp: Callable[[np.ndarray], np.ndarray] = lambda u: u, shift: int = 0
) -> Callable[[jax.Array, SamplingBatch], np.ndarray]:
    """A sampler in numpy: filters, then an inverted CDF. `warp` spoils the uniforms, `shift` the choice."""

    def sampler(logits: jax.Array, batch: SamplingBatch) -> np.ndarray:
        row = Filters(*(np.asarray(x)[0].item() for x in (batch.temperature, batch.top_k, batch.top_p, batch.min_p)))
        cdf = np.cumsum(probabilities_of(np.asarray(logits)[0], row, steps))
        u = warp(np.asarray(uniforms(batch.request_key, batch.sample_position), np.float64))
        choice = np.searchsorted(cdf, u * cdf[-1], side="right") + shift
        return np.minimum(choice, VOCAB - 1)

    return sampler


def top_p_without_the_crossing_token(p: np.ndarray, filters: Filters) -> np.ndarray:
    order = most_likely_first(p)
    inside = np.cumsum(p[order]) <= filters.top_p
    inside[0] = True
    return keep(p, order[inside])


def top_k_of_one_more(p: np.ndarray, filters: Filters) -> np.ndarray:
    return reference.top_k(p, Filters(top_k=filters.top_k + 1)) if filters.top_k else p


def top_k_with_all_ties(p: np.ndarray, filters: Filters) -> np.ndarray:
    return keep(p, p >= np.sort(p)[-filters.top_k]) if 0 < filters.top_k < len(p) else p


def min_p_of_the_whole(p: np.ndarray, filters: Filters) -> np.ndarray:
    return keep(p, (p >= filters.min_p) | (p == p.max()))


def no_temperature(p: np.ndarray, filters: Filters) -> np.ndarray:
    return p


def replaced(right: Step, wrong: Step) -> tuple[Step, ...]:
    return tuple(wrong if step is right else step for step in STEPS)


T, K, P, M = STEPS
WRONG = {
    "top_p_without_the_crossing_token": make_sampler(replaced(P, top_p_without_the_crossing_token)),
    "temperature_after_top_p": make_sampler((K, P, T, M)),
    "temperature_after_min_p": make_sampler((K, P, M, T)),
    "top_p_before_top_k": make_sampler((T, P, K, M)),
    "top_k_of_one_more": make_sampler(replaced(K, top_k_of_one_more)),
    "top_k_with_all_ties": make_sampler(replaced(K, top_k_with_all_ties)),
    "min_p_of_the_whole": make_sampler(replaced(M, min_p_of_the_whole)),
    "no_temperature": make_sampler(replaced(T, no_temperature)),
    "no_top_k": make_sampler((T, P, M)),
    "no_top_p": make_sampler((T, K, M)),
    "no_min_p": make_sampler((T, K, P)),
    "the_next_token_of_the_cdf": make_sampler(shift=1),
    "one_uniform_for_all_rows": make_sampler(warp=lambda u: np.full_like(u, u[0])),
    "uniforms_that_lean_to_zero": make_sampler(warp=lambda u: u**1.1),
    "uniforms_that_stop_short_of_one": make_sampler(warp=lambda u: 0.97 * u),
    "uniforms_of_few_bits": make_sampler(warp=lambda u: np.floor(u * 64) / 64),
}


def is_rejected(sampler, logits: np.ndarray, filters: Filters) -> bool:
    try:
        check_sampler(sampler, logits, filters)
    except WrongDistributionError:
        return True
    return False


TABLE = [(kind(VOCAB), filters) for kind in LOGITS.values() for filters in SMALL.values()]


def test_a_right_sampler_in_numpy_is_accepted_in_every_case():
    assert not any(is_rejected(make_sampler(), *case) for case in TABLE)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_is_rejected_in_some_case(name):
    assert any(is_rejected(WRONG[name], *case) for case in TABLE)

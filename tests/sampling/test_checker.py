"""The checker accepts a right sampler and rejects every wrong one that is planted here."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from scipy.special import ndtri

from jaxinfer.sampling.noise import random_bits as device_bits
from jaxinfer.sampling.sampler import SamplingBatch
from tests.sampling import reference
from tests.sampling.cases import LOGITS, SMALL
from tests.sampling.checker import WrongDistributionError, check_sampler
from tests.sampling.reference import STEPS, Filters, Step, keep, most_likely_first, probabilities_of

VOCAB = 50
random_bits = jax.jit(device_bits)


def gumbel_of(uniform: np.ndarray) -> np.ndarray:
    return -np.log(-np.log(uniform))


def make_sampler(
    steps: Sequence[Step] = STEPS,
    noise: Callable[[np.ndarray], np.ndarray] = gumbel_of,
    position: Callable[[np.ndarray], np.ndarray] = lambda position: position,
    token: Callable[[np.ndarray], np.ndarray] = lambda token: token,
) -> Callable[[jax.Array, SamplingBatch], np.ndarray]:
    """A sampler in numpy: filters, then the argmax of perturbed log probabilities.

    `noise` makes it of uniform numbers [rows, VOCAB]; `position` and `token` spoil what the generator counts by.
    """

    def sampler(logits: jax.Array, batch: SamplingBatch) -> np.ndarray:
        row = Filters(*(np.asarray(x)[0].item() for x in (batch.temperature, batch.top_k, batch.top_p, batch.min_p)))
        probabilities = probabilities_of(np.asarray(logits)[0], row, steps)
        at = position(np.asarray(batch.sample_position)[:, None]), token(np.arange(VOCAB))
        bits = np.asarray(random_bits(batch.request_key[:, None], *at), np.float64)
        with np.errstate(divide="ignore"):
            return np.argmax(np.log(probabilities) + noise((bits + 0.5) / 2**32), axis=-1)

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


T, M, K, P = STEPS
WRONG = {
    "top_p_without_the_crossing_token": make_sampler(replaced(P, top_p_without_the_crossing_token)),
    "temperature_after_top_p": make_sampler((M, K, P, T)),
    "temperature_after_min_p": make_sampler((M, T, K, P)),
    "top_p_before_top_k": make_sampler((T, M, P, K)),
    "min_p_after_top_p": make_sampler((T, K, P, M)),
    "top_k_of_one_more": make_sampler(replaced(K, top_k_of_one_more)),
    "top_k_with_all_ties": make_sampler(replaced(K, top_k_with_all_ties)),
    "min_p_of_the_whole": make_sampler(replaced(M, min_p_of_the_whole)),
    "no_temperature": make_sampler(replaced(T, no_temperature)),
    "no_top_k": make_sampler((T, M, P)),
    "no_top_p": make_sampler((T, M, K)),
    "no_min_p": make_sampler((T, K, P)),
    "half_of_the_noise": make_sampler(noise=lambda u: 0.5 * gumbel_of(u)),
    "noise_of_the_wrong_tail": make_sampler(noise=lambda u: -gumbel_of(u)),
    "normal_noise": make_sampler(noise=lambda u: 1.28 * ndtri(u)),
    "exponential_noise_once": make_sampler(noise=lambda u: -np.log(u)),
    "noise_whose_tail_is_thin": make_sampler(noise=lambda u: gumbel_of(1 - (1 - u) ** 0.9)),
    "noise_that_stops_short": make_sampler(noise=lambda u: gumbel_of(0.97 * u)),
    "noise_of_few_bits": make_sampler(noise=lambda u: gumbel_of((np.floor(u * 64) + 0.5) / 64)),
    "one_noise_for_all_rows": make_sampler(position=lambda position: 0 * position),
    "one_noise_for_all_tokens": make_sampler(token=lambda token: 0 * token),
    "one_noise_for_pairs_of_tokens": make_sampler(token=lambda token: token // 2),
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

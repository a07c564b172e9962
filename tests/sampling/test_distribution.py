"""The sampler draws from exactly the distribution that its parameters describe."""

import jax
import numpy as np
import pytest

from jaxinfer.sampling.sampler import sample
from tests.sampling.cases import LARGE, LOGITS, SMALL
from tests.sampling.checker import DRAWS, check_sampler
from tests.sampling.reference import Filters, probabilities_of, sampling_batch

pytestmark = pytest.mark.optimized

sampler = jax.jit(sample)
LARGE_DRAWS = 8192


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("vocab", [7, 50])
def test_draws_from_a_vocabulary_within_the_candidates(vocab, name, kind):
    check_sampler(sampler, LOGITS[kind](vocab), SMALL[name])


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("name", LARGE)
def test_draws_from_a_vocabulary_beyond_the_candidates(name, kind):
    check_sampler(sampler, LOGITS[kind](700), LARGE[name], draws=LARGE_DRAWS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("everything", "peaked"),
        ("top_k_beyond_the_candidates", "flat"),
        ("top_p_that_many_tokens_fill", "flat"),
        ("few_of_many", "head_and_tail"),
        ("all", "tied"),
    ],
)
def test_draws_from_a_vocabulary_of_2000_words(name, kind):
    check_sampler(sampler, LOGITS[kind](2000), LARGE[name], draws=LARGE_DRAWS)


def test_the_kept_sets_of_the_cases_end_below_at_and_beyond_the_candidates():
    sizes = {np.count_nonzero(probabilities_of(LOGITS[kind](700), LARGE[name])) for kind in LOGITS for name in LARGE}
    assert {40, 64, 65, 150, 700} <= sizes
    assert min(sizes) < 20


@pytest.mark.parametrize("token", [0, 63, 64, 699])
def test_a_token_that_has_all_the_mass_is_always_drawn(token):
    logits = np.full((LARGE_DRAWS, 700), -np.inf, np.float32)
    logits[:, token] = 1.5
    assert np.all(np.asarray(sampler(logits, sampling_batch([Filters()], repeat=LARGE_DRAWS))) == token)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-38])
def test_a_tiny_temperature_draws_the_most_likely_token(temperature):
    logits = np.random.default_rng(0).normal(0, 10, (DRAWS, 50)).astype(np.float32)
    tokens = sampler(logits, sampling_batch([Filters(temperature=temperature)], repeat=DRAWS))
    top_two = np.sort(logits, axis=-1)[:, -2:]
    decided = top_two[:, 1] - top_two[:, 0] > 100 * temperature
    assert decided.sum() > DRAWS // 2
    assert np.array_equal(np.asarray(tokens)[decided], logits.argmax(axis=-1)[decided])


def test_a_very_high_temperature_draws_uniformly():
    check_sampler(sampler, LOGITS["peaked"](7), Filters(temperature=1e6))


def test_logits_far_from_zero_are_sampled_as_their_differences_say():
    check_sampler(sampler, LOGITS["peaked"](7) + np.float32(3000), Filters(top_p=0.93, temperature=1.1))

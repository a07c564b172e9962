"""A row without a finite greatest score gets `NO_SCORE` instead of a token, and its neighbours are not affected."""

import jax
import numpy as np
import pytest

from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.sampling.sampler import sample
from tests.sampling.bounds_cases import enter, nobody
from tests.sampling.reference import Filters, sampling_batch
from tests.sampling.test_rows import KINDS, ROWS, VOCAB, random_logits

sampler = jax.jit(sample)
FAULTS = {"NaN": [np.nan], "NaN of the other sign": [-np.nan], "infinity": [np.inf], "both": [np.inf, np.nan]}
BAD = slice(1, None, 3)


@pytest.mark.parametrize("place", [0, 63, 64, VOCAB - 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_logit_fails_its_row_and_no_other(fault, place):
    rows = list(KINDS.values()) * 3
    logits, positions = random_logits(len(rows)), np.arange(len(rows))
    sound = np.asarray(sampler(logits, sampling_batch(rows, positions=positions)))
    assert sound.min() >= 0
    for first in range(3):  # each kind of row fails in one of these
        bad = slice(first, None, 4)
        poisoned = logits.copy()
        poisoned[bad, place : place + len(FAULTS[fault])] = FAULTS[fault]
        expected = sound.copy()
        expected[bad] = NO_SCORE
        assert np.array_equal(sampler(poisoned, sampling_batch(rows, positions=positions)), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("neighbours", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_bad_logits_fails_beside_any_others(kind, neighbours, value):
    rows = [KINDS[kind] if row % 3 == 1 else KINDS[neighbours] for row in range(ROWS)]
    expected = np.asarray(sampler(random_logits(), sampling_batch(rows))).copy()
    poisoned = random_logits()
    poisoned[BAD], expected[BAD] = value, NO_SCORE
    assert np.array_equal(sampler(poisoned, sampling_batch(rows)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_allowed_tokens_are_all_banned_fails(kind):
    bounds = nobody(1, VOCAB)
    enter(bounds, 0, {"allowed": [7, 9], "biases": {7: -np.inf, 9: -np.inf}})
    seats = np.where(np.arange(ROWS) == 4, 0, -1)
    bounded = Bounded(bounds, seats, np.full(ROWS, 5), np.full((ROWS, 1), -1))  # type: ignore[arg-type]
    tokens = sampler(jax.jit(Bounded.hold)(bounded, random_logits()), sampling_batch([KINDS[kind]] * ROWS))
    expected = np.asarray(sampler(random_logits(), sampling_batch([KINDS[kind]] * ROWS))).copy()
    expected[4] = NO_SCORE
    assert np.array_equal(tokens, expected)


@pytest.mark.parametrize(
    "filters",
    [
        Filters(temperature=1e30), Filters(temperature=1e30, top_k=9), Filters(temperature=1.2e-38, top_p=0.5),
        Filters(temperature=1.2e-38), Filters(top_p=1.2e-38), Filters(top_k=300, top_p=1.2e-38),
        Filters(top_p=1 - 1e-7), Filters(min_p=1.0, top_k=300), Filters(min_p=1.2e-38), Filters(top_k=2**31 - 1),
    ],
    ids=str,
)  # fmt: skip
def test_extreme_parameters_sample_tokens_of_the_vocabulary(filters):
    tokens = np.asarray(sampler(random_logits() * 100, sampling_batch([filters] * ROWS)))
    assert tokens.min() >= 0 and tokens.max() < VOCAB

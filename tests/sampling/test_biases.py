"""Values added to single logits of single rows: banned tokens never appear, everything else stays as it was."""

import jax
import numpy as np
import pytest

from jaxinfer.sampling.adjustments import Adjustments, adjust
from jaxinfer.sampling.sampler import sample
from tests.sampling.checker import DRAWS, check_draws
from tests.sampling.reference import Filters, probabilities_of, sampling_batch

sampler = jax.jit(lambda logits, sampling, adjustments: sample(adjust(logits, adjustments), sampling))
VOCAB = 50
BANNED = (3, 17, 49)
KINDS = {
    "greedy": Filters(temperature=0.0),
    "everything": Filters(temperature=2.0),
    "top_k": Filters(temperature=2.0, top_k=8),
    "top_p": Filters(temperature=2.0, top_p=0.9),
    "min_p": Filters(temperature=2.0, min_p=0.1),
}


def likely_banned() -> np.ndarray:
    logits = np.random.default_rng(0).normal(0, 1, VOCAB).astype(np.float32)
    logits[list(BANNED)] = 4.0
    return logits


def draw(logits: np.ndarray, rows, biases, repeat: int = 1) -> np.ndarray:
    tiled = np.tile(logits, (repeat * len(rows), 1))
    adjustments = Adjustments.empty(len(tiled), len(biases))
    for entry, (row, token, value) in enumerate(biases):
        adjustments.row[entry], adjustments.token[entry], adjustments.bias[entry] = row, token, value
    return np.asarray(sampler(tiled, sampling_batch(rows, repeat=repeat), adjustments))


@pytest.mark.parametrize("kind", KINDS)
def test_banned_tokens_never_appear_however_likely_they_are(kind):
    biases = [(row, token, -np.inf) for row in range(256) for token in BANNED]
    tokens = draw(likely_banned(), [KINDS[kind]], biases, repeat=256)
    assert not set(tokens.tolist()) & set(BANNED)
    assert set(draw(likely_banned(), [KINDS[kind]], [(256, 0, 0.0)] * len(biases), repeat=256).tolist()) & set(BANNED)


def test_the_other_tokens_of_a_row_with_a_ban_keep_their_distribution():
    filters = Filters(temperature=1.4, top_k=12, top_p=0.9)
    biases = [(row, token, -np.inf) for row in range(DRAWS) for token in BANNED]
    tokens = draw(likely_banned(), [filters], biases, repeat=DRAWS)
    allowed = likely_banned()
    allowed[list(BANNED)] = -np.inf
    check_draws(tokens, probabilities_of(allowed, filters))


def test_a_ban_in_one_row_leaves_the_others_alone():
    rows = list(KINDS.values())
    free = draw(likely_banned(), rows, [(len(rows), 0, 0.0)] * len(BANNED))
    banned = draw(likely_banned(), rows, [(2, token, -np.inf) for token in BANNED])
    others = np.arange(len(rows)) != 2
    assert np.array_equal(banned[others], free[others])


def test_entries_of_rows_out_of_range_do_nothing():
    rows = list(KINDS.values())
    free = draw(likely_banned(), rows, [])
    assert np.array_equal(draw(likely_banned(), rows, [(len(rows), 3, -np.inf), (len(rows) + 9, 17, 5.0)]), free)


def test_a_finite_value_is_added_before_the_most_likely_token_is_chosen():
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 1.0
    assert draw(logits, [KINDS["greedy"]], [(0, 9, 1.5)]).tolist() == [9]

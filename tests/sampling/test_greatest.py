"""The argmax of scores, the first of equals, along either axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.sampling import greatest
from jaxinfer.sampling.greatest import (
    MOST_WITHOUT_SORT,
    NO_SCORE,
    WORDS_PER_BLOCK,
    first_of_greatest,
    greatest_of_rows,
    top_of_rows,
)

pytestmark = pytest.mark.optimized


# Whole blocks of words, one block, small blocks and blocks of one word.
@pytest.mark.parametrize("vocab", [10 * WORDS_PER_BLOCK, WORDS_PER_BLOCK, 500, 509])
def test_of_equal_logits_the_first_is_taken(vocab):
    logits = np.random.default_rng(0).integers(-3, 3, (vocab, 40)).astype(np.float32)
    assert np.array_equal(first_of_greatest(logits), np.argmax(logits, axis=0))
    assert np.array_equal(greatest_of_rows(logits.T), np.argmax(logits, axis=0))


FORMS = {
    "columns": lambda scores: first_of_greatest(scores.T),
    "rows": greatest_of_rows,
    "rows of a GPU": greatest._of_rows_elsewhere,
}


@pytest.mark.parametrize("vocab", [10 * WORDS_PER_BLOCK, 509])
@pytest.mark.parametrize("form", FORMS)
def test_what_has_nan_or_no_finite_greatest_says_so_and_others_do_not(form, vocab):
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 2, (60, vocab)).astype(np.float32)
    scores[::4, ::3] = -np.inf
    expected = np.argmax(scores, axis=1)
    for row in range(1, 60, 4):
        # NaN has either sign: the one that a processor makes of 0 * inf has the other.
        scores[row, rng.integers(vocab)] = [np.nan, -np.nan][row // 4 % 2]
    scores[2::8, 5], scores[6::8] = np.inf, -np.inf
    scores[1, 0], scores[5, -1], scores[9] = np.nan, np.nan, np.nan
    expected[1::4] = expected[2::4] = NO_SCORE
    found = jax.jit(FORMS[form])(scores)
    assert np.array_equal(found, expected) and found.dtype == np.int32


@pytest.mark.parametrize("form", FORMS)
def test_the_greatest_of_scores_with_ties_is_the_first(form):
    scores = np.random.default_rng(0).integers(-3, 3, (40, 509)).astype(np.float32)
    assert np.array_equal(jax.jit(FORMS[form])(scores), np.argmax(scores, axis=1))


TOPS = {"chosen": top_of_rows, "passes of a GPU": greatest._in_passes}


@pytest.mark.parametrize("count", [1, MOST_WITHOUT_SORT, MOST_WITHOUT_SORT + 4])
@pytest.mark.parametrize("form", TOPS)
def test_the_greatest_are_those_of_top_k_in_its_order(form, count):
    rng = np.random.default_rng(2)
    scores = rng.normal(0, 2, (8, 700)).astype(np.float32)
    scores[1] = rng.integers(-3, 3, 700)  # equal ones
    scores[2], scores[3, 5:], scores[4] = -np.inf, -np.inf, -3.0
    scores[5, ::9], scores[6, 7] = np.inf, np.nan
    found = jax.jit(lambda scores: TOPS[form](scores, count))(scores)
    expected = lax.top_k(jnp.asarray(scores), count)
    assert np.array_equal(found[1], expected[1]) and found[1].dtype == np.int32
    assert np.array_equal(found[0], expected[0], equal_nan=True)


def test_what_tells_the_most_likely_tokens_sorts_no_vocabulary_on_a_gpu():
    text = jax.jit(lambda scores: greatest._in_passes(scores, 20)).lower(np.zeros((2, 5000), np.float32)).as_text()
    assert "stablehlo.sort" not in text and "top_k" not in text

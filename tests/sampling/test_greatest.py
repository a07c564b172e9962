"""The first of the greatest, along either axis."""

import numpy as np
import pytest

from jaxinfer.sampling.greatest import WORDS_PER_BLOCK, first_of_greatest, greatest_of_rows


# Whole blocks of words, one block, small blocks and blocks of one word.
@pytest.mark.parametrize("vocab", [10 * WORDS_PER_BLOCK, WORDS_PER_BLOCK, 500, 509])
def test_of_equal_logits_the_first_is_taken(vocab):
    logits = np.random.default_rng(0).integers(-3, 3, (vocab, 40)).astype(np.float32)
    logits[:, 5] = -np.inf
    assert np.array_equal(first_of_greatest(logits), np.argmax(logits, axis=0))
    assert np.array_equal(greatest_of_rows(logits.T), np.argmax(logits, axis=0))


def test_a_column_or_row_with_nan_gives_a_token_of_the_vocabulary():
    logits = np.zeros((8, 3), np.float32)
    logits[4, 1] = np.nan
    logits[6, 2] = 1.0
    assert first_of_greatest(logits).tolist() == greatest_of_rows(logits.T).tolist() == [0, 0, 6]

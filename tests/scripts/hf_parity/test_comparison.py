"""The comparison with transformers tells a difference from a near tie."""

from __future__ import annotations

import numpy as np
import pytest

from hf_parity.comparison import Comparison, Reference, compare

PROMPTS = [[1, 2, 3], [4]]


def theirs(margins: list[list[float]]) -> Reference:
    return Reference([np.zeros((3, 9)), np.zeros((1, 9))], [[5, 6, 7], [8, 8, 8]], np.array(margins))


def test_equal_tokens_are_equal_and_the_smallest_margin_is_told():
    rows = compare(PROMPTS, [[5, 6, 7], [8, 8, 8]], theirs([[0.5, 1e-5, 0.2], [1, 2, 3]]))
    assert rows == [Comparison(3, 3, 3, 1e-5), Comparison(1, 3, 3, 1.0)]
    assert [row.verdict(1e-3) for row in rows] == ["equal", "equal"]


def test_a_difference_counts_from_its_first_token_with_the_margin_there():
    rows = compare(PROMPTS, [[5, 0, 7], [0, 8, 8]], theirs([[1e-5, 0.5, 1e-5], [1e-4, 2, 3]]))
    assert rows == [Comparison(3, 3, 1, 0.5), Comparison(1, 3, 0, 1e-4)]
    assert [row.verdict(1e-3) for row in rows] == ["DIFFERENT", "near tie"]


def test_continuations_of_different_lengths_are_no_comparison():
    with pytest.raises(ValueError):
        compare(PROMPTS, [[5, 6], [8, 8, 8]], theirs([[1, 1, 1], [1, 1, 1]]))

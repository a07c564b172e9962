"""MXFP4 as fixtures store it: what is exact, how halves and blocks are ordered, and how the rest is rounded."""

from __future__ import annotations

import numpy as np

from hf_parity.published import from_mxfp4, to_mxfp4

MAGNITUDES = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0, 6], np.float32)


def test_weights_that_mxfp4_can_say_come_back_as_they_were():
    random = np.random.default_rng(0)
    rows = random.permuted(np.tile(MAGNITUDES, (3, 5, 2, 2)), axis=-1)
    weights = np.ldexp(rows, random.integers(-9, 9, (3, 5, 2, 1)).astype(np.int32)).reshape(3, 5, 64)
    blocks, scales = to_mxfp4(weights)
    assert blocks.shape == (3, 5, 2, 16) and scales.shape == (3, 5, 2)
    assert blocks.dtype == scales.dtype == np.uint8
    np.testing.assert_array_equal(from_mxfp4(blocks, scales), weights)


def test_the_low_half_of_a_byte_is_the_earlier_column():
    weights = np.zeros((1, 32), np.float32)
    weights[0, :4] = 6, 0.5, -6, 1
    blocks, scales = to_mxfp4(weights)
    assert blocks[0, 0, :2].tolist() == [0x17, 0x2F] and not blocks[0, 0, 2:].any()
    assert scales.tolist() == [[127]]


def test_a_block_of_zeros_stays_one():
    blocks, scales = to_mxfp4(np.zeros((2, 32), np.float32))
    assert not from_mxfp4(blocks, scales).any()


def test_other_weights_are_rounded_to_the_nearest_that_it_can_say():
    weights = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    kept = from_mxfp4(*to_mxfp4(weights))
    largest = np.abs(weights).reshape(4, 3, 32).max(-1).repeat(32, axis=-1)
    # Half of a step is at most a quarter of the largest, and so is what is cut above 1.5 * 2**2.
    assert (np.abs(kept - weights) <= largest / 4).all()
    assert np.abs(kept - weights).mean() < 0.2 * np.abs(weights).mean()

"""One number in [0, 1) for each key and position."""

import jax
import numpy as np
from scipy.stats import chi2

from jaxinfer.sampling.sampler import uniforms as device_uniforms

COUNT = 1 << 16
BINS = 256


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(device_uniforms)(keys.astype(np.uint32), positions.astype(np.int32)))


def is_even(values: np.ndarray, bins: int = BINS) -> bool:
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), bins - 1) > 1e-6


def test_numbers_of_one_key_spread_evenly_over_zero_to_one():
    values = uniforms(np.tile([1, 2], (COUNT, 1)), np.arange(COUNT))
    assert values.dtype == np.float32 and values.min() >= 0 and values.max() < 1
    assert is_even(values)


def test_numbers_of_one_position_spread_evenly_over_keys():
    keys = np.stack([np.zeros(COUNT), np.arange(COUNT)], axis=-1)
    assert is_even(uniforms(keys, np.full(COUNT, 12)))


def test_numbers_of_successive_positions_are_independent():
    values = uniforms(np.tile([1, 2], (COUNT, 1)), np.arange(COUNT))
    pairs = (values[:-1] * 16).astype(int) * 16 + (values[1:] * 16).astype(int)
    assert is_even((pairs[::2] + 0.5) / BINS)


def test_numbers_of_neighbouring_keys_are_independent():
    keys = np.stack([np.zeros(COUNT), np.arange(COUNT)], axis=-1)
    values = uniforms(keys, np.full(COUNT, 3))
    pairs = (values[0::2] * 16).astype(int) * 16 + (values[1::2] * 16).astype(int)
    assert is_even((pairs + 0.5) / BINS)

"""One Gumbel number for each key, position and token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from jaxinfer.sampling import noise
from tests.tolerances import tolerance

COUNT = 1 << 16
FALSE_ALARM_RATE = 1e-6
random_bits, gumbel = jax.jit(noise.random_bits), jax.jit(noise.gumbel)
# What varies from number to number, while the other two stay.
SERIES = {
    "first words of keys": lambda n: (np.stack([n, np.full_like(n, 4)], axis=-1), 12, 7),
    "second words of keys": lambda n: (np.stack([np.full_like(n, 4), n], axis=-1), 12, 7),
    "positions": lambda n: (np.array([17, 4]), n, 7),
    "tokens": lambda n: (np.array([17, 4]), 12, n),
}


def arguments(series: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    key, position, token = SERIES[series](np.arange(COUNT))
    return key.astype(np.uint32), np.asarray(position, np.int32), np.asarray(token, np.int32)


def is_even(bins: np.ndarray, count: int) -> bool:
    """Whether bins in [0, count) occur equally often, by Pearson's chi-square."""
    expected = len(bins) / count
    statistic = ((np.bincount(bins, minlength=count) - expected) ** 2 / expected).sum()
    return stats.chi2.sf(statistic, count - 1) > FALSE_ALARM_RATE


def test_the_bits_are_those_of_threefry_in_jax():
    rng = np.random.default_rng(0)
    keys, counters = (rng.integers(0, 2**32, (300, 2), np.uint32) for _ in range(2))
    expected = [
        threefry_2x32(jnp.asarray(key), jnp.asarray(counter))[0] for key, counter in zip(keys, counters, strict=True)
    ]
    assert np.array_equal(random_bits(keys, counters[:, 0], counters[:, 1]), np.asarray(expected))


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("shift", [24, 12, 0], ids=["high bits", "middle bits", "low bits"])
def test_bits_spread_evenly(series, shift):
    assert is_even((np.asarray(random_bits(*arguments(series))) >> shift) & 255, 256)


@pytest.mark.parametrize("distance", [1, 2, 64, 1024])
@pytest.mark.parametrize("series", SERIES)
def test_neighbours_are_independent(series, distance):
    high = (np.asarray(random_bits(*arguments(series))) >> 28).astype(np.int64)
    assert is_even(high[:-distance] * 16 + high[distance:], 256)


@pytest.mark.parametrize("series", SERIES)
def test_one_bit_of_a_counter_or_key_changes_half_of_the_bits(series):
    key, position, token = arguments(series)
    bits = np.asarray(random_bits(key, position, token))
    flipped = bits[np.arange(COUNT) ^ 1] ^ bits
    per_bit = ((flipped[:, None] >> np.arange(32)) & 1).mean(axis=0)
    assert np.abs(per_bit - 0.5).max() < 6 * 0.5 / np.sqrt(COUNT / 2)


def test_numbers_are_gumbel_distributed():
    values = np.asarray(gumbel(np.array([3, 9], np.uint32), np.arange(256)[:, None], np.arange(4096))).ravel()
    assert values.dtype == np.float32
    assert is_even((stats.gumbel_r.cdf(values.astype(np.float64)) * 512).astype(int), 512)


def test_the_upper_tail_has_the_resolution_of_32_bits(monkeypatch):
    bits = np.array([0, 1, 2, 3, 1000, 1001, 1 << 20, (1 << 20) + 1], np.uint32)
    monkeypatch.setattr(noise, "random_bits", lambda key, position, token: jnp.asarray(bits))
    zero = jnp.zeros((), jnp.int32)
    values = np.asarray(noise.gumbel(jnp.zeros(2, jnp.uint32), zero, zero), np.float64)
    exact = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))
    assert np.all(np.diff(values) < 0)
    np.testing.assert_allclose(values, exact, rtol=tolerance(1e-6))


def test_every_number_is_finite(monkeypatch):
    bits = np.array([0, 2**31, 2**32 - 1, 2**32 - 200], np.uint32)
    monkeypatch.setattr(noise, "random_bits", lambda key, position, token: jnp.asarray(bits))
    zero = jnp.zeros((), jnp.int32)
    values = np.asarray(noise.gumbel(jnp.zeros(2, jnp.uint32), zero, zero))
    assert np.isfinite(values).all() and -3 < values.min() < values.max() < 23


def test_a_token_has_one_number_alone_among_candidates_and_in_the_vocabulary():
    key, vocab = np.array([[5, 6], [5, 7]], np.uint32)[:, None], 5003
    positions = np.array([[3], [70]], np.int32)
    whole = np.asarray(gumbel(key, positions, np.arange(vocab, dtype=np.int32)[None]))
    some = np.random.default_rng(0).integers(0, vocab, (2, 64)).astype(np.int32)
    assert np.array_equal(gumbel(key, positions, some), np.take_along_axis(whole, some, axis=1))
    for row in range(2):
        alone = gumbel(key[row, 0], positions[row, 0], np.int32(vocab - 1))
        assert alone == whole[row, -1]

"""Caches that are cut after a rejection."""

import numpy as np
import pytest

from jaxinfer.textbook.speculative.caching import prune_cache


def layers(length=100):
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.standard_normal((1, 2, length, 4)) for _ in "kv") for _ in range(3))


class Lengths:
    current_length = 100

    def truncate(self, length):
        self.current_length = length


def test_five_of_a_hundred_tokens_are_cut_from_every_layer():
    cache = layers()
    for before, after in zip(cache, prune_cache(cache, 5), strict=True):
        for whole, cut in zip(before, after, strict=True):
            assert cut.shape == (1, 2, 95, 4)
            np.testing.assert_array_equal(cut, whole[:, :, :95])


def test_nothing_to_discard_keeps_everything():
    assert [array.shape[2] for layer in prune_cache(layers(), 0) for array in layer] == [100] * 6


def test_layers_without_a_cache_stay_so_and_no_cache_is_none():
    first, *_ = layers()
    assert prune_cache((None, first), 99)[0] is None and prune_cache((None, first), 99)[1][0].shape[2] == 1
    assert prune_cache(None, 3) is None


def test_a_cache_with_a_length_is_cut_in_place():
    cache = Lengths()
    assert prune_cache(cache, 5) is cache and cache.current_length == 95


@pytest.mark.parametrize("cache", [layers(), Lengths()])
@pytest.mark.parametrize("count", [101, -1, 0.5])
def test_impossible_counts_are_refused(cache, count):
    with pytest.raises(ValueError, match="num_tokens_to_discard"):
        prune_cache(cache, count)


def test_other_caches_are_refused_by_their_type():
    with pytest.raises(TypeError, match="list"):
        prune_cache([], 1)

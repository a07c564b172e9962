"""Settings and counts of the source's prefix cache."""

import re

import pytest

from jaxinfer.textbook.prefix_cache import PrefixCache, PrefixCacheConfig, PrefixCacheStats


def test_defaults_are_those_of_the_source():
    config = PrefixCacheConfig()
    assert (config.max_cached_tokens, config.min_prefix_length, config.eviction_threshold) == (65536, 4, 0.9)
    assert config.enable_auto_eviction is config.enable_stats is True
    assert PrefixCache().config == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_cached_tokens", 0, "max_cached_tokens must be an integer of at least 1, got 0"),
        ("min_prefix_length", 0, "min_prefix_length must be an integer of at least 1, got 0"),
        ("min_prefix_length", 2.5, "min_prefix_length must be an integer of at least 1, got 2.5"),
        ("enable_auto_eviction", 1, "enable_auto_eviction must be True or False, got 1"),
        ("enable_stats", None, "enable_stats must be True or False, got None"),
        ("eviction_threshold", 0, "eviction_threshold must be a number above 0 and at most 1, got 0"),
        ("eviction_threshold", 1.1, "eviction_threshold must be a number above 0 and at most 1, got 1.1"),
        ("eviction_threshold", float("nan"), "eviction_threshold must be a number above 0 and at most 1, got nan"),
        ("eviction_threshold", "0.9", "eviction_threshold must be a number above 0 and at most 1, got '0.9'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PrefixCacheConfig(**{field: value})


def test_statistics_are_written_as_by_the_source():
    stats = PrefixCacheStats(100, 85, 15, 50000, 35000, 15000, 3, 10000)
    assert stats.to_string() == (
        "PrefixCache Stats:\n"
        "  Total requests: 100\n"
        "  Cache hits: 85 (85%)\n"
        "  Cache misses: 15\n"
        "  Total tokens: 50000\n"
        "  Tokens reused: 35000 (70%)\n"
        "  Tokens computed: 15000\n"
        "  Evictions: 3\n"
        "  Tokens evicted: 10000\n"
    )


def test_rates_are_zero_before_the_first_request():
    stats = PrefixCacheStats()
    assert (stats.hit_rate(), stats.reuse_rate()) == (0.0, 0.0)


def used_cache(**settings) -> PrefixCache:
    cache = PrefixCache(PrefixCacheConfig(max_cached_tokens=20, **settings))
    for first in (0, 10, 20):
        cache.insert(list(range(first, first + 10)), first, 10)
        cache.match(list(range(first, first + 12)))
        cache.release(list(range(first, first + 10)))
    cache.match([99])
    cache.evict(0)
    return cache


def test_every_request_and_every_eviction_counts():
    assert used_cache().get_stats() == PrefixCacheStats(4, 3, 1, 37, 30, 7, 3, 30)


def test_without_statistics_nothing_is_counted_and_all_else_is_done():
    cache = used_cache(enable_stats=False)
    assert cache.get_stats() == PrefixCacheStats()
    assert (cache.get_cached_tokens(), cache.get_tree_stats()) == (0, used_cache().get_tree_stats())


def test_statistics_are_a_copy():
    cache = PrefixCache()
    before = cache.get_stats()
    before.total_requests = 7
    cache.match([1])
    assert (before.total_requests, cache.get_stats().total_requests) == (7, 1)


@pytest.mark.parametrize("target", [-1, 0.5, True])
def test_a_target_that_is_no_number_of_tokens_is_refused(target):
    with pytest.raises(ValueError, match=f"target_tokens must be an integer of at least 0, got {target}"):
        PrefixCache().evict(target)


def test_insertions_that_contradict_themselves_are_refused_and_change_nothing():
    cache = PrefixCache()
    for tokens, start, length, message in (
        ([1, 2, 3], 0, 4, "kv_length must be the number of tokens, 3, got 4"),
        ([], 0, 4, "kv_length must be the number of tokens, 0, got 4"),
        ([1, 2, 3], -1, 3, "kv_start_pos must be an integer of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.insert(tokens, start, length)
    assert cache.dump_tree() == "ROOT\n"

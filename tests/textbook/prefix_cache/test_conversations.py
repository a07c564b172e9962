"""The conversations of the source's sections 1, 3, 4 and 5, by their numbers.

Slips of the source: 3 + 5 + 5 new tokens are called 11 (here there are 11), and three requests that compute 8, 6 and 0
tokens are said to compute 6 (here 14).
"""

import pytest

from jaxinfer.textbook.prefix_cache import PrefixCache, PrefixCacheConfig, PrefixCacheManager, RadixTree

END, ASSISTANT = [151645, 198], [151644, 77091, 198]
ONE, TWO = [1, 2, 3, 4, 5, 10, 11, 12], [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 22, 30, 31, 32]


def user(*words: int) -> list[int]:
    return [151644, 872, 198, *words, *END]


def counts(cache: PrefixCache | PrefixCacheManager) -> tuple[int, ...]:
    """Requests, hits, misses; tokens processed, reused, computed."""
    stats = cache.get_stats()
    return (
        stats.total_requests, stats.cache_hits, stats.cache_misses,
        stats.total_tokens_processed, stats.tokens_reused, stats.tokens_computed,
    )  # fmt: skip


def small_cache(**settings) -> PrefixCache:
    """The small cache of the source's tests: 30 tokens, evicting from 0.7."""
    return PrefixCache(
        PrefixCacheConfig(**{"max_cached_tokens": 30, "eviction_threshold": 0.7, "min_prefix_length": 2, **settings})
    )


def test_the_second_turn_of_a_chat_reuses_the_first():
    cache = PrefixCache(PrefixCacheConfig(max_cached_tokens=10000, min_prefix_length=4))
    prompt = [151644, 8948, 198, 100, 101, 102, *END, *user(1, 2, 3), *ASSISTANT]
    cache.insert(prompt, 0, 19)
    assert cache.dump_tree() == "ROOT\n  Edge[151644,8948,198,100,101...+14] *KV(pos=0,len=19,ref=0)\n"
    full = [*prompt, *range(200, 210), *END]
    cache.insert(full, 0, 31)
    follow_up = [*full, *user(4, 5, 6), *ASSISTANT]
    assert (len(prompt), len(full), len(follow_up)) == (19, 31, 42)
    match = cache.match(follow_up)
    assert (match.cache_hit, match.matched_tokens, match.prefill_start_pos, match.prefill_count) == (True, 31, 31, 11)
    assert match.matched_prefix == full
    assert f"{match.reuse_ratio:.0%}" == "74%"
    cache.release(match.matched_prefix)
    assert cache.dump_tree().count("ref=0") == 2


def test_the_hit_rate_and_the_reuse_rate_of_three_requests():
    cache = PrefixCache()
    for tokens, matched in ((ONE, 0), (TWO, 8), (TWO, 14)):
        match = cache.match(tokens)
        assert (match.matched_tokens, match.prefill_count) == (matched, len(tokens) - matched)
        cache.insert(tokens, 0, len(tokens))
        cache.release(match.matched_prefix)
    assert counts(cache) == (3, 2, 1, 36, 22, 14)
    stats = cache.get_stats()
    assert f"{stats.hit_rate():.1%} {stats.reuse_rate():.1%}" == "66.7% 61.1%"
    assert "Cache hits: 2 (66.6667%)" in stats.to_string()


def test_counts_after_each_of_the_three_requests():
    cache = PrefixCache()
    cache.match(ONE)
    assert counts(cache) == (1, 0, 1, 8, 0, 8)
    cache.insert(ONE, 0, 8)
    cache.match(TWO)
    assert counts(cache) == (2, 1, 1, 22, 8, 14)
    cache.insert(TWO, 0, 14)
    cache.match(TWO)
    assert counts(cache) == (3, 2, 1, 36, 22, 14)


@pytest.mark.parametrize(("length", "is_hit"), [(3, False), (4, True)])
def test_a_hit_has_at_least_four_tokens(length, is_hit):
    cache = PrefixCache()
    cache.insert(ONE[:length], 0, length)
    match = cache.match(ONE)
    assert (match.cache_hit, match.matched_tokens) == (is_hit, length if is_hit else 0)
    assert (match.prefill_start_pos + match.prefill_count, match.matched_prefix) == (8, ONE[:length] if is_hit else [])
    assert cache.dump_tree().endswith(f"ref={int(is_hit)})\n")


def test_a_request_that_is_cached_whole_has_nothing_to_prefill():
    cache = PrefixCache()
    cache.insert(ONE, 0, 8)
    match = cache.match(ONE)
    assert (match.prefill_start_pos, match.prefill_count, match.reuse_ratio) == (8, 0, 1.0)


def test_a_request_without_tokens_is_not_counted():
    cache = PrefixCache()
    cache.insert([], 0, 0)
    match = cache.match([])
    assert (match.cache_hit, match.prefill_count, match.reuse_ratio, match.matched_prefix) == (False, 0, 0.0, [])
    assert counts(cache) == (0, 0, 0, 0, 0, 0)
    assert cache.get_cached_tokens() == 0


def test_what_a_request_uses_is_not_evicted_from_a_cache_of_thirty_tokens():
    cache = small_cache()
    first, second, third = list(range(1, 11)), list(range(20, 30)), list(range(30, 40))
    cache.insert(first, 0, 10)
    match = cache.match(first)
    assert match.cache_hit and "ref=1" in cache.dump_tree()
    cache.insert(second, 10, 10)
    assert cache.get_cached_tokens() == 20  # 20 is not above 30 * 0.7
    cache.insert(third, 20, 10)  # 30 is: the second one goes, which leaves at most 30 * 0.8
    assert cache.get_cached_tokens() == 20
    assert (cache.get_stats().eviction_count, cache.get_stats().tokens_evicted) == (1, 10)
    assert [cache.remove(each) for each in (second, third)] == [False, True]
    again = cache.match(first)
    assert again.cache_hit
    cache.release(again.matched_prefix)
    cache.release(match.matched_prefix)
    assert "ref=0" in cache.dump_tree()
    assert cache.evict(0) == 10


def test_without_its_reference_the_first_sequence_would_have_been_evicted():
    cache = small_cache()
    for first in (1, 20, 30):
        cache.insert(list(range(first, first + 10)), first, 10)
    assert not cache.match(list(range(1, 11))).cache_hit
    assert cache.match(list(range(20, 30))).cache_hit


def test_two_requests_on_one_prefix_protect_it_until_both_have_ended():
    cache = PrefixCache()
    prefix = list(range(1, 101))
    cache.insert(prefix, 0, 100)
    requests = [cache.match(prefix), cache.match(prefix)]
    for references, request in ((2, requests[0]), (1, requests[1])):
        assert f"ref={references}" in cache.dump_tree()
        assert cache.evict(0) == 0
        cache.release(request.matched_prefix)
    assert cache.evict(0) == 100
    assert cache.get_cached_tokens() == 0


def test_an_eviction_leaves_at_most_so_many_tokens():
    cache = PrefixCache()
    for first in range(0, 50, 10):
        cache.insert(list(range(first, first + 10)), first, 10)
    assert (cache.evict(50), cache.evict(25), cache.get_cached_tokens()) == (0, 30, 20)
    assert (cache.get_stats().eviction_count, cache.get_stats().tokens_evicted) == (1, 30)


def test_eviction_starts_above_nine_tenths_and_ends_at_eight():
    cache = PrefixCache(PrefixCacheConfig(max_cached_tokens=100))
    for first in range(0, 900, 100):
        cache.insert(list(range(first, first + 10)), first, 10)
    assert cache.get_usage_ratio() == 0.9 and cache.get_stats().eviction_count == 0
    cache.insert([7, 8], 950, 2)
    assert cache.get_cached_tokens() == 72  # 92, less two of the oldest
    assert not cache.match(list(range(100, 110))).cache_hit
    assert cache.match(list(range(200, 210))).cache_hit


def test_without_automatic_eviction_the_cache_grows_beyond_its_limit():
    cache = small_cache(enable_auto_eviction=False)
    for first in range(0, 50, 10):
        cache.insert(list(range(first, first + 10)), first, 10)
    assert (cache.get_cached_tokens(), cache.get_stats().eviction_count) == (50, 0)
    assert cache.get_usage_ratio() == pytest.approx(50 / 30)


@pytest.mark.parametrize(("length", "cached"), [(29, 29), (30, 30), (31, 0)])
def test_the_newest_sequence_is_evicted_only_if_it_exceeds_the_limit_itself(length, cached):
    cache = small_cache()
    cache.insert([*range(500, 510)], 0, 10)
    cache.insert(list(range(length)), 0, length)
    assert cache.get_cached_tokens() == cached


def test_only_what_is_in_use_exceeds_the_limit():
    cache = small_cache(max_cached_tokens=12)
    first, second = list(range(10)), list(range(20, 30))
    cache.insert(first, 0, 10)
    request = cache.match(first)
    cache.insert(second, 10, 10)
    assert (cache.get_cached_tokens(), cache.match(second).cache_hit) == (10, False)
    longer = [*first, 77, 78, 79]
    cache.insert(longer, 0, 13)
    assert cache.get_cached_tokens() == 10
    cache.release(request.matched_prefix)


def test_a_removed_prefix_is_no_hit_and_its_release_does_nothing():
    cache = PrefixCache()
    cache.insert(ONE, 0, 8)
    match = cache.match(ONE)
    assert cache.remove(ONE) and not cache.remove(ONE)
    cache.insert(ONE, 0, 8)
    cache.release(match.matched_prefix)
    assert "ref=0" in cache.dump_tree() and cache.match(ONE).cache_hit
    cache.clear()
    assert not cache.match(ONE).cache_hit and cache.get_cached_tokens() == 0


SYSTEM = [151644, 8948, 198, *range(2000, 2017), *END, 151644, 872, 198]
ROUND_1 = [*SYSTEM, *range(3000, 3012), *END, *ASSISTANT]
ROUND_1_FULL = [*ROUND_1, *range(4000, 4025), *END]
ROUND_2 = [*ROUND_1_FULL, 151644, 872, 198, 100244, 103110, 104429, *END, *ASSISTANT]
ROUND_2_FULL = [*ROUND_2, *range(5000, 5026), *END]
ROUND_3 = [*SYSTEM, 12345, 67890, 3, 4, 5, *END, *ASSISTANT]


def test_the_rounds_of_the_long_example_have_their_lengths():
    rounds = (SYSTEM, ROUND_1, ROUND_1_FULL, ROUND_2, ROUND_2_FULL, ROUND_3)
    assert list(map(len, rounds)) == [25, 42, 69, 80, 108, 35]


def test_the_first_round_misses_and_is_registered():
    manager = PrefixCacheManager()
    match = manager.match(ROUND_1)
    assert (match.matched_tokens, match.cache_hit, match.prefill_start_pos, match.prefill_count) == (0, False, 0, 42)
    manager.register_prefix(ROUND_1_FULL, 69)
    assert counts(manager) == (1, 0, 1, 42, 0, 42)
    assert manager.get_stats().hit_rate() == manager.get_stats().reuse_rate() == 0.0
    assert manager.get_cached_tokens() == 69


def test_the_second_round_computes_eleven_of_eighty_tokens(capsys):
    manager = PrefixCacheManager()
    manager.match(ROUND_1)
    manager.register_prefix(ROUND_1_FULL, 69)
    match = manager.match(ROUND_2)
    assert (match.matched_tokens, match.cache_hit, match.prefill_start_pos, match.prefill_count) == (69, True, 69, 11)
    assert match.reuse_ratio == 0.8625 and match.prefill_count / len(ROUND_2) == 0.1375
    assert match.matched_prefix == ROUND_1_FULL
    manager.register_prefix(ROUND_2_FULL, 108)
    manager.release(match.matched_prefix)
    stats = manager.get_stats()
    assert counts(manager) == (2, 1, 1, 122, 69, 53)
    assert f"{stats.hit_rate():.0%} {stats.reuse_rate():.1%}" == "50% 56.6%"
    manager.print_stats()
    assert capsys.readouterr().out == (
        "PrefixCache Stats:\n"
        "  Total requests: 2\n"
        "  Cache hits: 1 (50%)\n"
        "  Cache misses: 1\n"
        "  Total tokens: 122\n"
        "  Tokens reused: 69 (56.5574%)\n"
        "  Tokens computed: 53\n"
        "  Evictions: 0\n"
        "  Tokens evicted: 0\n"
        "RadixTree Stats:\n"
        "  Total nodes: 3\n"
        "  Terminal nodes: 2\n"
        "  Max depth: 2\n"
        "  Cached tokens: 177\n"
    )


def test_references_during_and_after_the_second_round():
    cache = PrefixCache()
    edges = "ROOT\n  Edge[151644,8948,198,2000,2001...+64] *KV(pos=0,len=69,ref={})\n"
    below = "    Edge[151644,872,198,100244,103110...+34] *KV(pos=0,len=108,ref=0)\n"
    cache.insert(ROUND_1_FULL, 0, 69)
    assert cache.dump_tree() == edges.format(0)
    match = cache.match(ROUND_2)
    cache.insert(ROUND_2_FULL, 0, 108)
    assert cache.dump_tree() == edges.format(1) + below
    cache.release(match.matched_prefix)
    assert cache.dump_tree() == edges.format(0) + below


def test_a_third_round_that_leaves_an_edge_after_twenty_five_tokens_reuses_none():
    cache, tree = PrefixCache(), RadixTree()
    for each in (cache, tree):
        each.insert(ROUND_1_FULL, 0, 69)
        each.insert(ROUND_2_FULL, 0, 108)
    match = cache.match(ROUND_3)
    assert (match.cache_hit, match.prefill_count) == (False, 35)
    found = tree.find_longest_prefix(ROUND_3)
    assert (found.matched_length, found.edge_offset, found.kv_cache_pos) == (25, 25, -1)


def test_the_third_round_reuses_a_stem_that_was_registered_by_itself():
    manager = PrefixCacheManager()
    manager.register_prefix(SYSTEM, 25)
    manager.register_prefix(ROUND_1_FULL, 69)
    match = manager.match(ROUND_3)
    assert (match.cache_hit, match.matched_tokens, match.prefill_count) == (True, 25, 10)


def test_a_sequence_that_is_extended_is_cached_beside_its_beginning():
    manager = PrefixCacheManager()
    manager.register_prefix(ONE, 8)
    manager.extend_prefix(TWO, 14)
    assert manager.get_cached_tokens() == 22
    assert manager.match([*TWO, 5]).matched_tokens == 14
    with pytest.raises(ValueError, match="new_kv_length must be the number of tokens, 14, got 6"):
        manager.extend_prefix(TWO, 6)
    manager.clear()
    assert manager.get_cached_tokens() == 0


def test_a_manager_is_a_cache_with_the_settings_of_the_source():
    manager = PrefixCacheManager(max_tokens=40)
    for first in range(0, 30, 10):
        manager.register_prefix(list(range(first, first + 10)), 10)
    manager.register_prefix([91, 92, 93], 3)  # 33 tokens are below 36
    assert manager.get_cached_tokens() == 33
    manager.register_prefix([95, 96, 97, 98], 4)
    assert manager.get_cached_tokens() == 27  # 37, less the oldest ten: at most 32
    assert not manager.match([91, 92, 93, 94]).cache_hit
    assert manager.match([95, 96, 97, 98]).cache_hit
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1, got 0"):
        PrefixCacheManager(0)


def test_two_conversations_of_one_buffer_are_both_believed():
    """The source's worst fault, kept: position 0 holds the keys and values of one of them."""
    manager = PrefixCacheManager()
    manager.register_prefix(ONE, 8)
    manager.register_prefix([9, 9, 9, 9], 4)
    assert manager.match(ONE).cache_hit and manager.match([9, 9, 9, 9]).cache_hit
    manager.clear()
    assert not manager.match(ONE).cache_hit

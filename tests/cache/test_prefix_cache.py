"""The prefix cache: one page in one state, one handle for one request, and counts that say what was saved."""

import pytest

from jaxinfer.cache.page_allocator import OutOfPagesError, PageAllocator
from jaxinfer.cache.prefix_cache import CacheConfig, PrefixCache, PrefixCacheStats


def make_cache(num_pages: int = 32, page_size: int = 4, **config) -> PrefixCache:
    return PrefixCache(CacheConfig(page_size=page_size, **config), PageAllocator(num_pages))


def fill(cache: PrefixCache, tokens: list[int], extra_key=None, **options) -> list[int]:
    """Publish a sequence that a request has computed and left."""
    pages = cache.allocator.allocate(len(tokens) // cache.config.page_size)
    result = cache.insert(tokens, pages, None, extra_key, **options)
    cache.allocator.free(result.duplicates)
    return pages


def states(cache: PrefixCache) -> tuple[int, int, int]:
    cache.check_integrity()
    allocator = cache.allocator
    assert allocator.num_free + allocator.num_cached + allocator.num_held == allocator.num_pages
    return allocator.num_free, allocator.num_cached, allocator.num_held


def test_the_life_of_a_request():
    cache = make_cache(num_pages=8)
    tokens = list(range(10))
    match = cache.match_and_lock(tokens, max_tokens=9)
    assert not match.cache_hit and match.pages == []
    lane = cache.allocator.allocate(3)
    assert states(cache) == (5, 0, 3)
    assert cache.extend(match.handle, tokens[:4], lane[:1]) == ([lane[0]], [])
    assert cache.extend(match.handle, tokens[4:8], lane[1:2]) == ([lane[1]], [])
    assert states(cache) == (5, 2, 1)
    assert cache.evict_pages(8) == 0
    cache.allocator.free(lane[2:])
    cache.release(match.handle)
    assert states(cache) == (6, 2, 0)
    again = cache.match_and_lock(tokens, max_tokens=9)
    assert again.pages == lane[:2]
    assert (again.num_cached_tokens, again.prefill_start_pos, again.prefill_count) == (8, 8, 2)
    assert again.cache_hit and again.reuse_ratio == 0.8
    cache.release(again.handle)
    assert cache.evict_pages(8) == 2
    assert states(cache) == (8, 0, 0)


def test_a_match_leaves_a_token_to_compute_when_it_is_asked_to():
    cache = make_cache(page_size=4)
    fill(cache, list(range(8)))
    assert cache.match_and_lock(range(8), max_tokens=7).num_cached_tokens == 4
    assert cache.match_and_lock(range(8)).num_cached_tokens == 8
    assert cache.match_and_lock(range(8), max_tokens=0).num_cached_tokens == 0
    with pytest.raises(ValueError, match="max_tokens must be None or at least 0, got -1"):
        cache.match_and_lock([], max_tokens=-1)


def test_two_with_the_same_prompt_share_after_the_first_page():
    cache = make_cache()
    prompt = list(range(16))
    first, second = cache.match_and_lock(prompt), cache.match_and_lock(prompt)
    mine, other = cache.allocator.allocate(4), cache.allocator.allocate(4)
    assert cache.extend(first.handle, prompt[:4], mine[:1]).taken == mine[:1]
    third = cache.match_and_lock(prompt)
    assert third.pages == mine[:1]
    assert cache.extend(second.handle, prompt[:8], other[:2]) == (other[1:2], other[:1])
    assert cache.extend(first.handle, prompt[4:], mine[1:]) == (mine[2:], mine[1:2])
    assert states(cache) == (24, 4, 4)
    assert cache.match_and_lock(prompt).pages == [mine[0], other[1], *mine[2:]]


def test_a_handle_covers_what_it_published_and_not_what_came_after_it():
    cache = make_cache(page_size=1)
    fill(cache, [1, 2, 3])
    ahead, behind = cache.match_and_lock([1, 2, 3]), cache.match_and_lock([1, 2, 3])
    cache.extend(ahead.handle, [4, 5], cache.allocator.allocate(2))
    assert (ahead.handle.num_pages, behind.handle.num_pages) == (5, 3)
    cache.release(ahead.handle)
    assert cache.num_evictable == 2
    assert cache.evict_pages(9) == 2
    cache.release(behind.handle)
    assert cache.num_evictable == 3


def test_insert_with_a_handle_passes_over_what_it_covers():
    cache = make_cache(page_size=2)
    pages = fill(cache, [1, 2, 3, 4])
    match = cache.match_and_lock([1, 2, 3, 4, 5, 6, 7])
    new = cache.allocator.allocate(1)
    assert cache.insert([1, 2, 3, 4, 5, 6, 7], pages + new, match.handle) == (new, [])
    assert match.handle.num_pages == 3


def test_insert_refuses_tokens_that_do_not_begin_with_the_handles():
    cache = make_cache(page_size=2)
    pages = fill(cache, [1, 2, 3, 4])
    handle = cache.match_and_lock([1, 2, 3, 4]).handle
    new = cache.allocator.allocate(1)
    with pytest.raises(ValueError, match="token_ids must begin with the 2 pages that the handle covers"):
        cache.insert([1, 2, 3, 9, 5, 6], pages + new, handle)
    with pytest.raises(ValueError, match="extra_key must be the handle's None, got 'salt'"):
        cache.insert([1, 2, 3, 4, 5, 6], pages + new, handle, "salt")
    assert states(cache) == (29, 2, 1)


def test_a_page_that_nobody_holds_is_not_taken_over():
    cache = make_cache(page_size=2)
    pages = fill(cache, [1, 2])
    held = cache.allocator.allocate(1)
    for bad, state in ((pages[0], "cached"), (31, "free")):
        with pytest.raises(ValueError, match=f"page {bad} must be held to be cached, it is {state}"):
            cache.insert([7, 7, 8, 8], [*held, bad])
        assert states(cache) == (30, 1, 1)
    with pytest.raises(ValueError, match="must be held to be cached, it is cached"):
        cache.insert([7, 7, 8, 8], held * 2)
    assert states(cache) == (30, 1, 1)
    assert cache.match_and_lock([7, 7]).pages == []


def test_pages_and_tokens_must_agree_in_number():
    cache = make_cache(page_size=2)
    held = cache.allocator.allocate(2)
    handle = cache.match_and_lock([1, 2, 3]).handle
    with pytest.raises(ValueError, match="pages must be 1, one for every 2 of 3 tokens, got 2"):
        cache.extend(handle, [1, 2, 3], held)
    assert states(cache) == (30, 0, 2)


def test_a_handle_is_released_once_and_useless_then():
    cache = make_cache(page_size=1)
    match = cache.match_and_lock([1])
    cache.release(match.handle)
    held = cache.allocator.allocate(1)
    for use in (
        lambda: cache.release(match.handle),
        lambda: cache.cancel(match),
        lambda: cache.extend(match.handle, [1], held),
        lambda: cache.insert([1], held, match.handle),
    ):
        with pytest.raises(ValueError, match="handle must be open, got one that is released already"):
            use()
    assert states(cache) == (31, 0, 1)
    assert cache.stats.total_requests == 1


def test_namespaces_share_nothing():
    cache = make_cache(page_size=2)
    plain, salted = fill(cache, [1, 2, 3, 4]), fill(cache, [1, 2, 3, 4], "salt")
    assert cache.match_and_lock([1, 2, 3, 4]).pages == plain
    match = cache.match_and_lock([1, 2, 3, 4], "salt")
    assert match.pages == salted
    cache.extend(match.handle, [5, 6], cache.allocator.allocate(1))
    assert cache.match_and_lock([1, 2, 3, 4, 5, 6]).num_cached_tokens == 4
    assert cache.match_and_lock([1, 2, 3, 4, 5, 6], "salt").num_cached_tokens == 6
    empty = cache.match_and_lock([9, 9], "pepper")
    cache.extend(empty.handle, [9, 9], cache.allocator.allocate(1))
    assert cache.match_and_lock([9, 9]).pages == []
    assert cache.match_and_lock([9, 9], "pepper").num_cached_tokens == 2


def test_counts_say_what_was_asked_and_what_was_found():
    cache = make_cache(page_size=2)
    assert cache.stats == PrefixCacheStats()
    assert (cache.stats.hit_rate, cache.stats.reuse_rate) == (0.0, 0.0)
    fill(cache, [1, 2, 3, 4])
    cache.match_and_lock([1, 2, 3, 4, 5])
    cache.match_and_lock([9, 9, 9])
    stats = cache.stats
    assert (stats.total_requests, stats.cache_hits, stats.cache_misses) == (2, 1, 1)
    assert (stats.total_tokens_processed, stats.tokens_reused, stats.tokens_computed) == (8, 4, 4)
    assert (stats.hit_rate, stats.reuse_rate, stats.tokens_inserted) == (0.5, 0.5, 4)


def test_a_match_that_is_not_made_use_of_leaves_no_count_and_no_lock():
    cache = make_cache(page_size=2)
    fill(cache, [1, 2, 3, 4])
    before = cache.stats
    cache.cancel(cache.match_and_lock([1, 2, 3, 4, 5]))
    cache.cancel(cache.match_and_lock([9, 9, 9]))
    assert cache.stats == before
    assert cache.num_evictable == 2


@pytest.mark.parametrize(("most", "left"), [(6, 6), (5, 4), (4, 4), (1, 0), (0, 0), (-3, 0), (100, 6)])
def test_evicting_to_a_number_of_tokens_leaves_no_more_than_these(most, left):
    cache = make_cache(page_size=2)
    fill(cache, [1, 2, 3, 4, 5, 6])
    assert cache.evict_to_tokens(most) == (6 - left) // 2
    assert cache.num_pages * 2 == left


def test_the_old_name_of_evicting_pages_warns():
    cache = make_cache(page_size=2)
    fill(cache, [1, 2, 3, 4])
    with pytest.warns(DeprecationWarning, match="evict_pages"):
        assert cache.evict(1) == 1


def test_evictions_are_counted_when_something_went():
    cache = make_cache(page_size=2)
    fill(cache, [1, 2, 3, 4, 5, 6])
    assert [cache.evict_pages(2), cache.evict_pages(2), cache.evict_pages(2)] == [2, 1, 0]
    assert (cache.stats.eviction_count, cache.stats.tokens_evicted) == (2, 6)


def test_free_pages_counts_what_eviction_could_free():
    cache = make_cache(num_pages=8, page_size=1)
    fill(cache, [1, 2, 3, 4, 5, 6])
    match = cache.match_and_lock([1, 2])
    assert (cache.free_pages, cache.num_evictable, cache.num_pages) == (6, 4, 6)
    with pytest.raises(OutOfPagesError):
        cache.allocator.allocate(6)
    cache.evict_pages(6 - cache.allocator.num_free)
    assert len(cache.allocator.allocate(6)) == 6
    cache.release(match.handle)


def test_remove_forgets_a_sequence_but_not_what_it_shares():
    cache = make_cache(page_size=1)
    fill(cache, [1, 2, 3])
    fill(cache, [1, 2, 4])
    assert cache.remove([1, 2, 3]) == 1
    assert cache.remove([1, 2, 3], "salt") == 0
    assert states(cache) == (29, 3, 0)


def test_clear_leaves_what_is_in_use():
    cache = make_cache(page_size=1)
    fill(cache, [1, 2, 3])
    match = cache.match_and_lock([1, 2])
    assert cache.clear() == 1
    assert cache.num_pages == 2
    cache.release(match.handle)
    assert cache.clear() == 2
    assert states(cache) == (32, 0, 0)


def test_a_limit_evicts_the_least_recently_used():
    cache = make_cache(page_size=1, max_cached_tokens=4)
    fill(cache, [1, 2, 3])
    fill(cache, [5, 6, 7])
    assert cache.num_pages == 4
    assert cache.match_and_lock([5, 6, 7]).num_cached_tokens == 3
    assert cache.match_and_lock([1, 2, 3]).num_cached_tokens == 1


def test_a_limit_holds_again_when_the_requests_above_it_end():
    cache = make_cache(page_size=1, max_cached_tokens=2)
    match = cache.match_and_lock([])
    cache.extend(match.handle, [1, 2, 3, 4], cache.allocator.allocate(4))
    assert cache.num_pages == 4
    cache.release(match.handle)
    assert states(cache) == (30, 2, 0)


def test_a_cache_that_is_switched_off_finds_and_keeps_nothing():
    cache = make_cache(page_size=1, enable_prefix_caching=False)
    match = cache.match_and_lock([1, 2])
    pages = cache.allocator.allocate(2)
    assert cache.extend(match.handle, [1, 2], pages) == ([], [])
    assert cache.insert([1, 2], pages) == ([], [])
    assert cache.match_and_lock([1, 2]).pages == []
    cache.cancel(match)
    assert states(cache) == (30, 0, 2)
    assert cache.stats == PrefixCacheStats()


def test_the_priority_policy_keeps_what_was_published_with_a_higher_one():
    cache = make_cache(page_size=1, eviction_policy="priority")
    fill(cache, [1], priority=2)
    fill(cache, [2], priority=1)
    assert cache.evict_pages(1) == 1
    assert cache.match_and_lock([1]).cache_hit and not cache.match_and_lock([2]).cache_hit


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", 0, "page_size must be at least 1, got 0"),
        ("max_cached_tokens", 3, "max_cached_tokens must be None or hold at least a page of 4, got 3"),
        ("eviction_policy", "random", "eviction_policy must be one of lru, lfu, fifo, priority, got 'random'"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**{"page_size": 4, field: value})


def test_a_drawn_cache_may_show_text():
    cache = make_cache(page_size=2)
    fill(cache, [104, 105])
    assert cache.dump() == "root\n└─ 2 tokens · 1 page · 0 locks · 0 hits · age 0"
    assert cache.dump(lambda tokens: "".join(map(chr, tokens))).endswith("age 0  hi")


def test_the_size_of_the_tree_is_that_of_what_is_cached():
    cache = make_cache(page_size=2)
    fill(cache, [1, 2, 3, 4, 5, 6])
    fill(cache, [1, 2, 3, 4, 7, 8])
    request = cache.match_and_lock([1, 2, 3, 4])
    sizes = cache.get_tree_stats()
    assert (sizes.num_nodes, sizes.num_leaves, sizes.depth) == (3, 2, 2)
    assert (sizes.num_tokens, sizes.num_pages, sizes.num_locked_pages) == (8, cache.num_pages, 2)
    cache.release(request.handle)
    assert cache.get_tree_stats().num_locked_pages == 0


def test_a_match_that_is_cancelled_counts_as_no_hit_of_its_pages():
    cache = make_cache(num_pages=4, page_size=2, eviction_policy="lfu")
    blocked, popular = [1, 2, 3, 4], [5, 6, 7, 8]
    fill(cache, blocked)
    fill(cache, popular)
    for _ in range(10):  # the head of the queue, for which there is no room
        cache.cancel(cache.match_and_lock([*blocked, 9, 9]))
    for _ in range(2):
        cache.release(cache.match_and_lock(popular).handle)
    assert cache.evict_pages(2) == 2
    assert cache.match_and_lock(popular).num_cached_tokens == 4
    assert cache.match_and_lock(blocked).num_cached_tokens == 0


def test_hits_are_taken_back_along_the_whole_path_and_where_it_was_split():
    cache = make_cache(page_size=2)
    fill(cache, [1, 2, 3, 4, 5, 6])
    fill(cache, [1, 2, 3, 4, 7, 8])
    kept = cache.match_and_lock([1, 2, 3, 4, 5, 6])
    cancelled = cache.match_and_lock([1, 2, 3, 4, 5, 6])
    cache.release(cache.match_and_lock([1, 2, 9, 9]).handle)  # splits the stem
    cache.cancel(cancelled)
    cache.release(kept.handle)
    hits = [line.split(" hit")[0].split()[-1] for line in cache.dump().splitlines()[1:]]
    assert hits == ["2", "1", "1", "0"]
    assert states(cache)[2] == 0

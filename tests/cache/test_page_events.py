"""Events of the prefix cache: a follower knows at any time what the cache would find."""

from __future__ import annotations

import random
import threading
import time

import pytest

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_events import AllCleared, PageEvents, PagesRemoved, PagesStored
from jaxinfer.cache.prefix_cache import CacheConfig, PrefixCache
from tests.cache.event_follower import Follower

SIZE = 4


def cache_with_events(pages: int = 40) -> tuple[PrefixCache, PageEvents]:
    cache = PrefixCache(CacheConfig(page_size=SIZE), PageAllocator(pages))
    events = PageEvents(SIZE, lambda namespace: namespace != "salted")
    cache.continue_events(events)
    return cache, events


@pytest.mark.parametrize("seed", range(30))
def test_a_follower_finds_what_the_cache_finds(seed):
    rng, (cache, events), follower = random.Random(seed), cache_with_events(), Follower(SIZE)
    open_handles, sequences = [], []
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        sequences.append(tokens)
        action = rng.random()
        if action < 0.5:
            match = cache.match_and_lock(tokens)
            missing = len(tokens) // SIZE - len(match.pages)
            if missing > cache.free_pages:
                cache.cancel(match)
                continue
            cache.evict_pages(max(0, missing - cache.allocator.num_free))
            pages = cache.allocator.allocate(missing)
            result = cache.extend(match.handle, tokens[match.num_cached_tokens :], pages)
            cache.allocator.free(result.duplicates)
            open_handles.append(match.handle)
        elif action < 0.8 and open_handles:
            cache.release(open_handles.pop(rng.randrange(len(open_handles))))
        elif action < 0.9:
            cache.evict_pages(rng.randrange(6))
        elif action < 0.97:
            cache.remove(tokens)
        else:
            cache.clear()
        follower.follow(events.take())
        assert len(follower.known) == cache.num_pages
        for asked in rng.sample(sequences, min(5, len(sequences))):
            match = cache.match_and_lock(asked)
            assert follower.find(asked) == match.num_cached_tokens
            cache.cancel(match)


def test_namespaces_have_other_hashes_and_salted_ones_are_not_told_of():
    cache, events = cache_with_events()
    tokens = list(range(2 * SIZE))
    for namespace in (None, "other", "salted"):
        cache.insert(tokens, cache.allocator.allocate(2), extra_key=namespace)
    cleared, first, second = events.take()
    assert isinstance(cleared, AllCleared)
    assert isinstance(first, PagesStored) and isinstance(second, PagesStored)
    assert first.token_ids == second.token_ids == tokens and not set(first.hashes) & set(second.hashes)
    assert cache.remove(tokens, "salted") == 2 and events.take() == []
    assert cache.remove(tokens) == 2 and events.take() == [PagesRemoved(first.hashes)]


def test_equal_tokens_have_equal_hashes_in_every_cache():
    found = []
    for pages in (10, 20):
        cache, events = cache_with_events(pages)
        cache.allocator.allocate(pages // 2)  # other pages are taken
        cache.insert([1] * SIZE + [2] * SIZE, cache.allocator.allocate(2))
        found.append(events.take()[1])
    assert found[0] == found[1]


def test_what_follows_pages_of_before_a_clearing_is_not_told_of():
    cache, events = cache_with_events()
    match = cache.match_and_lock([7] * SIZE)
    cache.extend(match.handle, [7] * SIZE, cache.allocator.allocate(1))
    cache.continue_events(events)  # as for new weights: the handle's page stays
    cache.extend(match.handle, [8] * SIZE, cache.allocator.allocate(1))
    cache.release(match.handle)
    cache.clear()
    kinds = [type(event) for event in events.take()]
    assert kinds == [AllCleared, PagesStored, AllCleared]


def test_a_thread_that_waits_for_events_is_woken_by_the_first():
    cache, events = cache_with_events()
    events.take()
    threading.Timer(0.05, lambda: cache.insert([1] * SIZE, cache.allocator.allocate(1))).start()
    begin = time.perf_counter()
    assert len(events.take(timeout=30)) == 1 and time.perf_counter() - begin < 20
    assert events.take(timeout=0.01) == []

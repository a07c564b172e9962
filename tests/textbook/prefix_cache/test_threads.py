"""Threads that share the source's cache, which promises that its methods may be called from any of them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer.textbook.prefix_cache import PrefixCache, PrefixCacheConfig, RadixTree


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let threads take turns every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], int], num_threads: int = 4) -> int:
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(work, range(num_threads)))


def random_tokens(rng: random.Random) -> list[int]:
    return [rng.randint(1, 2)] * rng.randint(1, 6) + [9] * rng.randint(0, 2)


def test_a_tree_that_many_threads_change_is_whole():
    tree = RadixTree()

    def work(seed: int) -> int:
        rng, total = random.Random(seed), 0
        for _ in range(400):
            tokens = random_tokens(rng)
            tree.insert(tokens, 0, len(tokens))
            if tree.add_reference(tokens):
                assert tree.find_longest_prefix(tokens).has_kv_cache()
                total += tree.release_reference(tokens)
            tree.evict_lru(rng.randint(0, 40))
        return total

    assert together(work) > 0
    total = tree.total_cached_tokens
    assert tree.evict_lru(0) == total
    assert (tree.dump(), tree.total_cached_tokens) == ("ROOT\n", 0)  # no reference is left


def test_requests_of_many_threads_keep_what_they_use_and_are_all_counted():
    cache = PrefixCache(PrefixCacheConfig(max_cached_tokens=40, min_prefix_length=1))

    def work(seed: int) -> int:
        rng, held = random.Random(seed), 0
        for _ in range(400):
            tokens = random_tokens(rng)
            match = cache.match(tokens)
            cache.insert(tokens, 0, len(tokens))
            cache.evict(rng.randint(0, 20))
            if match.cache_hit:
                again = cache.match(match.matched_prefix)
                held += again.matched_prefix == match.matched_prefix
                cache.release(again.matched_prefix)
            cache.release(match.matched_prefix)
        return held

    held, stats = together(work), cache.get_stats()
    assert 0 < held == stats.cache_hits / 2
    assert stats.total_requests == stats.cache_hits + stats.cache_misses == 1600 + held
    assert stats.tokens_reused + stats.tokens_computed == stats.total_tokens_processed
    assert cache.evict(0) >= 0
    assert (cache.dump_tree(), cache.get_cached_tokens()) == ("ROOT\n", 0)  # no reference is left


class NoLock:
    """A planted bug: a lock that is always free."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("is_locked", [True, False])
def test_no_other_thread_evicts_between_a_match_and_its_reference(is_locked):
    evicted: list[int] = []

    def evict() -> None:
        if cache._lock.acquire(blocking=False):
            evicted.append(cache.evict(0))
            cache._lock.release()

    class Interrupted(RadixTree):
        """A tree that another thread evicts from at the worst moment, if it can."""

        def find_longest_prefix(self, tokens):
            found = super().find_longest_prefix(tokens)
            if len(tokens) == 5:
                other = threading.Thread(target=evict)
                other.start()
                other.join()
            return found

    cache = PrefixCache()
    cache._tree = Interrupted()
    if not is_locked:
        cache._lock = NoLock()
    cache.insert([1, 2, 3, 4], 0, 4)
    assert cache.match([1, 2, 3, 4, 5]).matched_tokens == 4
    assert evicted == ([] if is_locked else [4])
    assert cache.match([1, 2, 3, 4]).cache_hit == is_locked

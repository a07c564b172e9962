"""The worked examples of the design's source on prefix caching, page size 1, with its slips corrected.

Corrected are: sums (19 + 10 + 2 tokens, 3 + 5 + 5 of a follow-up); that the token sampled last has no keys and values
yet; that a match inside an edge finds nothing; that a request matched whole has nothing left to compute logits from.
"""

import pytest

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import CacheConfig, CacheMatch, PrefixCache
from jaxinfer.cache.radix_tree import RadixTree
from jaxinfer.cache.radix_view import walk_tree


def make_cache(num_pages: int = 256, **config) -> PrefixCache:
    return PrefixCache(CacheConfig(page_size=1, **config), PageAllocator(num_pages))


def serve(cache: PrefixCache, prompt: list[int], output: list[int]) -> CacheMatch:
    """A request from its match to its end; the last token of its output is sampled and never computed."""
    match = cache.match_and_lock(prompt, max_tokens=len(prompt) - 1)
    computed = (prompt + output)[: len(prompt) + len(output) - 1]
    pages = cache.allocator.allocate(len(computed) - len(match.pages))
    result = cache.extend(match.handle, computed[len(match.pages) :], pages)
    cache.allocator.free(result.duplicates)
    cache.release(match.handle)
    cache.check_integrity()
    return match


def edges(tree: RadixTree) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Each edge with the edges below it."""
    below = lambda node: [tuple(child.token_ids) for child in node.children.values()]  # noqa: E731
    return {tuple(node.token_ids): sorted(below(node)) for node in (tree.root, *walk_tree(tree.root))}


def test_insertions_split_edges_as_in_the_example():
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4, 5], range(0, 5))
    assert edges(tree) == {(): [(1, 2, 3, 4, 5)], (1, 2, 3, 4, 5): []}
    tree.insert([1, 2, 3, 6, 7], range(10, 15))
    assert edges(tree) == {(): [(1, 2, 3)], (1, 2, 3): [(4, 5), (6, 7)], (4, 5): [], (6, 7): []}
    tree.insert([1, 2, 8, 9, 10], range(20, 25))
    assert edges(tree) == {
        (): [(1, 2)],
        (1, 2): [(3,), (8, 9, 10)],
        (3,): [(4, 5), (6, 7)],
        (4, 5): [],
        (6, 7): [],
        (8, 9, 10): [],
    }
    tree.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4]),
        ([1, 2, 8, 9, 10, 100], [0, 1, 22, 23, 24]),
        ([1, 2, 3], [0, 1, 2]),  # the source reuses nothing here, because no sequence ended there
        ([1, 2, 8, 9, 77], [0, 1, 22, 23]),
        ([7, 1, 2, 3], []),
    ],
)
def test_the_longest_prefix_is_found_in_the_tree_of_the_example(tokens, pages):
    tree = RadixTree(1)
    for first, sequence in ((0, [1, 2, 3, 4, 5]), (10, [1, 2, 3, 6, 7]), (20, [1, 2, 8, 9, 10])):
        tree.insert(sequence, range(first, first + 5))
    assert tree.match(tokens).pages == pages


def test_the_request_hit_rate_and_the_token_reuse_rate_of_the_example():
    cache = make_cache()
    first = [1, 2, 3, 4, 5, 10, 11, 12]
    second = [*first, 20, 21, 22, 30, 31, 32]
    for tokens in (first, second, second):
        match = cache.match_and_lock(tokens)
        cache.extend(match.handle, tokens[len(match.pages) :], cache.allocator.allocate(match.prefill_count))
        cache.release(match.handle)
    stats = cache.stats
    assert (stats.total_requests, stats.cache_hits, stats.cache_misses) == (3, 2, 1)
    assert (stats.total_tokens_processed, stats.tokens_reused, stats.tokens_computed) == (36, 22, 14)
    assert f"{stats.hit_rate:.1%} {stats.reuse_rate:.1%}" == "66.7% 61.1%"


def test_the_same_requests_as_an_engine_asks_for_them_leave_one_token_each_to_compute():
    cache = make_cache()
    first = [1, 2, 3, 4, 5, 10, 11, 12]
    second = [*first, 20, 21, 22, 30, 31, 32]
    for tokens in (first, second, second):
        serve(cache, tokens, [99])
    assert (cache.stats.tokens_reused, cache.stats.total_tokens_processed) == (8 + 13, 36)
    assert cache.stats.hit_rate == pytest.approx(2 / 3)


def test_the_second_turn_of_a_chat_computes_what_is_new_and_the_last_sampled_token():
    cache = make_cache()
    system = [151644, 8948, 198, 100, 101, 102, 151645, 198]
    assistant = [151644, 77091, 198]

    def user(*words: int) -> list[int]:
        return [151644, 872, 198, *words, 151645, 198]

    prompt = system + user(1, 2, 3) + assistant
    assert len(prompt) == 19
    assert not serve(cache, prompt, [*range(200, 210), 151645]).cache_hit
    history = [*prompt, *range(200, 210), 151645, 198]
    assert len(history) == 31
    follow_up = history + user(4, 5, 6) + assistant
    assert len(follow_up) == 42
    match = serve(cache, follow_up, [300])
    # The end token was sampled, not computed, and the line feed after it is the template's: 29 of the source's 31.
    assert (match.num_cached_tokens, match.prefill_count) == (29, 13)
    assert match.reuse_ratio == pytest.approx(29 / 42)


def test_three_rounds_of_the_long_example():
    cache = make_cache()
    end, ask = [151645, 198], [151645, 198, 151644, 77091, 198]
    stem = [151644, 8948, 198, *range(2000, 2017), *end, 151644, 872, 198]
    assert len(stem) == 25
    first = [*stem, *range(3000, 3012), *ask]
    assert len(first) == 42
    round_1 = serve(cache, first, [*range(4000, 4025), end[0]])
    assert (round_1.num_cached_tokens, round_1.prefill_count) == (0, 42)
    history = [*first, *range(4000, 4025), *end]
    assert len(history) == 69

    second = [*history, 151644, 872, 198, 100244, 103110, 104429, 99622, 11319, *ask]
    assert len(second) == 69 + 13  # the source counts 11
    round_2 = serve(cache, second, [*range(5000, 5025), end[0]])
    assert (round_2.num_cached_tokens, round_2.prefill_count) == (67, 15)
    assert len(list(walk_tree(cache._tree.root))) == 1  # one conversation, one node
    stats = cache.stats
    assert (stats.total_requests, stats.cache_hits, stats.hit_rate) == (2, 1, 0.5)
    assert (stats.total_tokens_processed, stats.tokens_reused, stats.tokens_computed) == (124, 67, 57)

    third = [*stem, 12345, 67890, 3, 4, 5, *ask]
    assert len(third) == 35
    round_3 = serve(cache, third, [7])
    assert (round_3.num_cached_tokens, round_3.prefill_count) == (25, 10)  # the source reuses none of the 25


def test_the_third_round_reuses_all_whole_pages_of_the_shared_stem():
    cache = PrefixCache(CacheConfig(page_size=8), PageAllocator(16))
    cache.insert(range(69), cache.allocator.allocate(8))
    assert cache.match_and_lock([*range(25), *range(500, 510)]).num_cached_tokens == 24


def test_what_a_request_uses_is_not_evicted_in_the_example_of_a_small_cache():
    cache = make_cache(max_cached_tokens=30)
    sequences = [list(range(1, 11)), list(range(20, 30)), list(range(30, 40)), list(range(40, 50))]
    cache.insert(sequences[0], cache.allocator.allocate(10))
    match = cache.match_and_lock(sequences[0])
    for sequence in sequences[1:]:
        cache.insert(sequence, cache.allocator.allocate(10))
    assert cache.num_pages == 30
    found = [cache.match_and_lock(sequence).num_cached_tokens for sequence in sequences]
    assert found == [10, 0, 10, 10]
    cache.release(match.handle)


def test_two_requests_on_one_prefix_protect_it_until_both_have_ended():
    cache = make_cache()
    prefix = list(range(1, 101))
    cache.insert(prefix, cache.allocator.allocate(100))
    a, b = cache.match_and_lock(prefix), cache.match_and_lock(prefix)
    assert a.handle.node.locks == 2
    assert cache.evict_pages(100) == 0
    cache.release(a.handle)
    assert a.handle.node.locks == 1
    assert cache.evict_pages(100) == 0
    cache.release(b.handle)
    assert cache.evict_pages(100) == 100

"""Random lives of a prefix cache beside a plain dictionary: prefix -> page. What is found is what a brute search finds.

The dictionary knows tokens by whole prefixes, page by page, and evicts page by page; the tree may split, join and trim
its nodes as it likes, but must give the same answers. Every page has contents: the tokens that were computed into it,
or poison once it is free, so that a read of a page that was given away is caught.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import CacheConfig, CacheMatch, PrefixCache

NUM_PAGES = 32
POISON = None

# Few sequences, of many lengths: most are the beginning of another one, or leave it near their end.
TOKENS = st.builds(
    lambda topic, stem, ones, more: [topic] * stem + [1] * ones + [topic] * more,
    st.sampled_from([2, 2, 3, 4]),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(0, 2),
)
SALTS = st.sampled_from([None, None, None, "salt"])

# A whole prefix of pages in a namespace, the one of a sequence's last page among them.
Prefix = tuple[str | None, tuple[int, ...]]


@dataclass(eq=False)
class Request:
    """A sequence, its lane of pages, and how many of them are published."""

    salt: str | None
    tokens: tuple[int, ...]
    match: CacheMatch
    lane: list[int]
    own: set[int] = field(default_factory=set)
    num_published: int = 0


class PrefixCacheLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.pages: dict[Prefix, int] = {}  # the model
        self.last_use: dict[Prefix, int] = {}
        self.contents: dict[int, Prefix | None] = {}
        self.time = 0
        self.counts = Counter()

    @initialize(
        page_size=st.integers(1, 3),
        policy=st.sampled_from(["lru", "lru", "lfu", "fifo", "priority"]),
        max_pages=st.sampled_from([None, None, 3, 8]),
    )
    def make(self, page_size, policy, max_pages):
        self.page_size, self.policy, self.max_pages = page_size, policy, max_pages
        self.allocator = PageAllocator(NUM_PAGES)
        limit = None if max_pages is None else max_pages * page_size
        self.cache = PrefixCache(CacheConfig(page_size, policy, limit), self.allocator)

    # What the model knows.

    def prefixes(self, salt, tokens) -> list[Prefix]:
        whole = len(tokens) // self.page_size
        return [(salt, tuple(tokens[: (index + 1) * self.page_size])) for index in range(whole)]

    def found(self, salt, tokens) -> list[Prefix]:
        known = self.prefixes(salt, tokens)
        return known[: next((index for index, prefix in enumerate(known) if prefix not in self.pages), len(known))]

    def locked(self) -> set[Prefix]:
        return {
            prefix
            for request in self.requests
            for prefix in self.prefixes(request.salt, request.tokens)[: request.num_published]
        }

    def ends(self, locked: set[Prefix]) -> list[Prefix]:
        """Prefixes that may be taken next: not locked, continued by nothing."""
        inner = {(salt, tokens[: -self.page_size]) for salt, tokens in self.pages}
        return [prefix for prefix in self.pages if prefix not in locked and prefix not in inner]

    def drop(self, prefix: Prefix) -> None:
        self.contents[self.pages.pop(prefix)] = POISON

    def evict_from_model(self, num_pages: int) -> None:
        """Follow an eviction of the cache: exactly for LRU, else by looking at which pages have become free."""
        locked = self.locked()
        if self.policy == "lru":
            for _ in range(num_pages):
                self.drop(min(self.ends(locked), key=self.last_use.__getitem__))
            return
        survivors = self.pages_in_cache()
        gone = [prefix for prefix, page in self.pages.items() if page not in survivors]
        assert len(gone) == num_pages and not locked & set(gone)
        for prefix in sorted(gone, key=lambda prefix: -len(prefix[1])):
            assert prefix in self.ends(locked)
            self.drop(prefix)

    def pages_in_cache(self) -> set[int]:
        """Asked without touching anything: every known prefix's page is in the tree, unless it was evicted."""
        nodes, found = list(self.cache._tree.root.children.values()), set()
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            found |= set(node.pages)
        return found

    def keep_model_to_limit(self) -> None:
        if self.max_pages is not None and len(self.pages) > self.max_pages:
            evictable = len(self.pages) - len(self.locked())
            self.evict_from_model(min(len(self.pages) - self.max_pages, evictable))

    # What a scheduler does.

    @rule(salt=SALTS, tokens=TOKENS, max_tokens=st.none() | st.integers(0, 8))
    def admit(self, salt, tokens, max_tokens):
        self.start(salt, tokens, max_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), max_tokens=st.integers(0, 8), at_once=st.booleans())
    def admit_another_one_like_it(self, data, max_tokens, at_once):
        """Then one follows the other page by page, or resumes from what the other has cached."""
        like = data.draw(st.sampled_from(self.requests))
        if at_once:
            self.live(like.salt, list(like.tokens))
        else:
            self.start(like.salt, list(like.tokens), max_tokens)

    @rule(salt=SALTS, tokens=TOKENS, priority=st.integers(0, 2))
    def serve(self, salt, tokens, priority):
        self.live(salt, tokens, priority)

    def live(self, salt, tokens, priority=0) -> None:
        """A whole life at once."""
        request = self.start(salt, tokens, None)
        if request is not None:
            self.publish_up_to(request, len(request.lane), priority=priority)
            self.finish(request)

    def start(self, salt, tokens, max_tokens) -> Request | None:
        expected = self.found(salt, tokens[:max_tokens])
        match = self.cache.match_and_lock(tokens, salt, max_tokens=max_tokens)
        assert match.pages == [self.pages[prefix] for prefix in expected]
        assert match.num_cached_tokens == len(expected) * self.page_size
        assert [self.contents[page] for page in match.pages] == expected, "a page with other tokens was found"
        request = Request(salt, tuple(tokens), match, list(match.pages), num_published=len(expected))
        self.requests.append(request)
        missing = len(self.prefixes(salt, tokens)) - len(expected)
        self.make_room(missing)
        if missing > self.allocator.num_free:
            self.cache.cancel(match)
            self.requests.remove(request)
            self.note_use(request)
            self.keep_model_to_limit()
            return None
        request.own = set(self.allocator.allocate(missing))
        request.lane += request.own
        for page, prefix in zip(request.lane, self.prefixes(salt, tokens), strict=True):
            if page in request.own:
                assert self.contents.get(page) is POISON, "a page in use was handed out"
                self.contents[page] = prefix
        self.counts += Counter(requests=1, hits=bool(expected), tokens=len(tokens), reused=match.num_cached_tokens)
        return request

    def make_room(self, missing: int) -> None:
        wanted = missing - self.allocator.num_free
        if wanted > 0:
            self.evict(wanted)

    def note_use(self, request: Request) -> None:
        self.time += 1
        for prefix in self.prefixes(request.salt, request.tokens)[: request.num_published]:
            self.last_use[prefix] = self.time

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), from_the_beginning=st.booleans(), priority=st.integers(0, 2))
    def publish(self, data, from_the_beginning, priority):
        request = data.draw(st.sampled_from(self.requests))
        last = data.draw(st.integers(request.num_published, len(request.lane)))
        self.publish_up_to(request, last, from_the_beginning, priority)

    def publish_up_to(self, request, last, from_the_beginning=False, priority=0) -> None:
        first = request.num_published
        tokens, pages = request.tokens[: last * self.page_size], request.lane[:last]
        if from_the_beginning:
            result = self.cache.insert(tokens, pages, request.match.handle, priority=priority)
        else:
            tokens = tokens[first * self.page_size :]
            result = self.cache.extend(request.match.handle, tokens, pages[first:], priority=priority)
        self.note_published(request, first, last, result)
        assert request.match.handle.num_pages == last
        self.keep_model_to_limit()

    def note_published(self, request, first, last, result) -> None:
        known = self.prefixes(request.salt, request.tokens)
        new = [index for index in range(first, last) if known[index] not in self.pages]
        assert result.taken == [request.lane[index] for index in new]
        assert result.duplicates == [request.lane[index] for index in range(first, last) if index not in new]
        for index in new:
            self.pages[known[index]] = request.lane[index]
        request.own -= set(result.taken)
        request.num_published = last

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        self.finish(data.draw(st.sampled_from(self.requests)))

    def finish(self, request) -> None:
        self.requests.remove(request)
        self.allocator.free(request.own)
        for page in request.own:
            self.contents[page] = POISON
        self.cache.release(request.match.handle)
        self.note_use(request)
        self.keep_model_to_limit()
        with pytest.raises(ValueError, match="released already"):
            self.cache.release(request.match.handle)

    @rule(num_pages=st.integers(1, 3) | st.integers(0, NUM_PAGES + 2))
    def evict(self, num_pages):
        expected = min(num_pages, len(self.pages) - len(self.locked()))
        assert self.cache.evict_pages(num_pages) == expected
        self.evict_from_model(expected)

    @rule(salt=SALTS, tokens=TOKENS)
    def remove(self, salt, tokens):
        locked, path, count = self.locked(), self.found(salt, tokens), 0
        while path and path[-1] in self.ends(locked):
            self.drop(path.pop())
            count += 1
        assert self.cache.remove(tokens, salt) == count

    @precondition(lambda self: self.time % 8 == 7)  # seldom, or there would never be much to find
    @rule()
    def clear(self):
        gone = set(self.pages) - self.locked()
        assert self.cache.clear() == len(gone)
        for prefix in gone:
            self.drop(prefix)

    # What holds after every one of them.

    @invariant()
    def the_sums_hold(self):
        self.cache.check_integrity()
        allocator = self.allocator
        assert allocator.num_cached == self.cache.num_pages == len(self.pages)
        assert allocator.num_held == sum(len(request.own) for request in self.requests)
        assert allocator.num_free + allocator.num_cached + allocator.num_held == NUM_PAGES
        assert self.cache.num_evictable == len(self.pages) - len(self.locked())
        sizes = self.cache.get_tree_stats()
        assert (sizes.num_pages, sizes.num_locked_pages) == (len(self.pages), len(self.locked()))
        assert sizes.num_tokens == len(self.pages) * self.cache.config.page_size and sizes.depth <= sizes.num_nodes

    @invariant()
    def the_cache_holds_the_pages_of_the_model(self):
        assert self.pages_in_cache() == set(self.pages.values())

    @invariant()
    def nothing_in_use_is_poisoned(self):
        for request in self.requests:
            assert [self.contents[page] for page in request.lane] == self.prefixes(request.salt, request.tokens)

    @invariant()
    def locks_are_the_handles(self):
        nodes = list(self.cache._tree.root.children.values())
        expected = Counter()
        for request in self.requests:
            node = request.match.handle.node
            while node is not None:
                expected[node] += 1
                node = node.parent
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.locks == expected[node]

    @invariant()
    def requests_are_counted(self):
        stats = self.cache.stats
        assert stats.total_requests == self.counts["requests"] and stats.cache_hits == self.counts["hits"]
        assert stats.total_tokens_processed == self.counts["tokens"] and stats.tokens_reused == self.counts["reused"]

    def teardown(self) -> None:
        while self.requests:
            request = self.requests.pop()
            self.allocator.free(request.own)
            self.cache.release(request.match.handle)
        self.cache.clear()
        assert self.allocator.num_free == NUM_PAGES and self.cache._tree.root.locks == 0


class TestPrefixCacheLife(PrefixCacheLife.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.slow
class TestLongPrefixCacheLife(PrefixCacheLife.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=80)

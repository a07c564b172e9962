"""The prefix cache: pages of finished and running requests, looked up by the tokens that they were computed from.

Keys are token ids, never text: a history that is tokenized anew may differ from what was generated, and then it shares
less. Only tokens whose keys and values are in their pages may be published; the token that was sampled last is known,
but not computed yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxinfer.cache.eviction import EvictionPolicy, make_eviction_policy
from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_events import PageEvents
from jaxinfer.cache.radix_node import TOKEN_BYTES, RadixNode, page_key
from jaxinfer.cache.radix_tree import RadixTree
from jaxinfer.cache.radix_view import TreeStats


@dataclass(frozen=True)
class CacheConfig:
    """Size and eviction policy of the prefix cache.

    Pages are evicted when a request needs them, not at a watermark. Sharing a page costs nothing, so every prefix of at
    least a page is shared.
    """

    page_size: int = 16  # slots of a page
    eviction_policy: str | EvictionPolicy = "lru"  # lru, lfu, fifo, priority, or a policy object
    max_cached_tokens: int | None = None  # None: the pool is the limit
    enable_prefix_caching: bool = True  # False: nothing is found and nothing is kept

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.max_cached_tokens is not None and self.max_cached_tokens < self.page_size:
            raise ValueError(
                f"max_cached_tokens must be None or hold at least a page of {self.page_size}, "
                f"got {self.max_cached_tokens}"
            )
        if isinstance(self.eviction_policy, str):
            make_eviction_policy(self.eviction_policy)


class PrefixHandle:
    """A request's lock on the path of its cached pages. It is given back once, by `release` or `cancel`."""

    __slots__ = ("extra_key", "is_open", "node", "num_pages")

    def __init__(self, node: RadixNode, num_pages: int, extra_key: Hashable) -> None:
        self.node = node
        self.num_pages = num_pages  # from the start of the sequence to the node's end
        self.extra_key = extra_key
        self.is_open = True


@dataclass(frozen=True)
class CacheMatch:
    """The cached prefix of a sequence, locked until `handle` is released. An empty match has a handle too."""

    num_tokens: int  # of the sequence
    num_cached_tokens: int  # a multiple of the page size
    pages: list[int]  # the pages that hold them, in order
    handle: PrefixHandle

    @property
    def cache_hit(self) -> bool:
        return self.num_cached_tokens > 0

    @property
    def prefill_start_pos(self) -> int:
        """Index of the first token that has to be computed."""
        return self.num_cached_tokens

    @property
    def prefill_count(self) -> int:
        """Tokens that have to be computed."""
        return self.num_tokens - self.num_cached_tokens

    @property
    def reuse_ratio(self) -> float:
        """Share of the tokens that is cached, 0 to 1."""
        return self.num_cached_tokens / self.num_tokens if self.num_tokens else 0.0


class PrefixInsertResult(NamedTuple):
    """The offered pages: those that the cache took, and those that it has already."""

    taken: list[int]  # owned by the cache from now on; the caller may read them while its handle is open
    duplicates: list[int]  # still the caller's, to use and to free: the cache has others for the same tokens


@dataclass
class PrefixCacheStats:
    """Counts since the cache was created."""

    total_requests: int = 0  # matches
    cache_hits: int = 0  # matches of at least a page
    total_tokens_processed: int = 0  # tokens that matches were asked for
    tokens_reused: int = 0
    tokens_inserted: int = 0
    eviction_count: int = 0  # evictions of at least a page
    tokens_evicted: int = 0

    @property
    def cache_misses(self) -> int:
        return self.total_requests - self.cache_hits

    @property
    def tokens_computed(self) -> int:
        return self.total_tokens_processed - self.tokens_reused

    @property
    def hit_rate(self) -> float:
        """Share of requests that found something, 0 to 1; 0 before the first one."""
        return self.cache_hits / self.total_requests if self.total_requests else 0.0

    @property
    def reuse_rate(self) -> float:
        """Share of the tokens asked for that was found, 0 to 1; 0 before the first one."""
        return self.tokens_reused / self.total_tokens_processed if self.total_tokens_processed else 0.0


class PrefixCache:
    """The owner of an allocator's cached pages. Not thread-safe: one caller drives it.

    A request opens a handle with `match_and_lock`, publishes pages as they fill with `extend`, and closes it with
    `release`. Pages that a handle covers are never evicted. Tokens may be given as ids or as a key from `page_key`.

    Args:
        stats: counts to continue; None: counts start at 0.

    Attributes:
        events: told of the pages that are taken and given back; None: nothing is.
    """

    def __init__(self, config: CacheConfig, allocator: PageAllocator, stats: PrefixCacheStats | None = None) -> None:
        self.config = config
        self.allocator = allocator
        self.events: PageEvents | None = None
        policy = config.eviction_policy
        self._tree = RadixTree(config.page_size, make_eviction_policy(policy) if isinstance(policy, str) else policy)
        self._page_bytes = config.page_size * TOKEN_BYTES
        self._max_pages = None if config.max_cached_tokens is None else config.max_cached_tokens // config.page_size
        self._stats = PrefixCacheStats() if stats is None else stats

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return self._tree.num_pages

    @property
    def num_evictable(self) -> int:
        """Cached pages that no handle covers, which `evict` can free."""
        return self._tree.num_evictable

    @property
    def free_pages(self) -> int:
        """Pages that are free, or that `evict` could free."""
        return self.allocator.num_free + self._tree.num_evictable

    @property
    def stats(self) -> PrefixCacheStats:
        """A copy of the current counts."""
        return replace(self._stats)

    def match_and_lock(
        self, token_ids: Sequence[int] | bytes, extra_key: Hashable = None, *, max_tokens: int | None = None
    ) -> CacheMatch:
        """Return the longest cached prefix in whole pages, locked against eviction until its handle is released.

        Args:
            extra_key: the namespace; nothing is shared between two of them.
            max_tokens: the most tokens to match. Logits need at least one computed token, so a request asks for one
                token less than it knows.
        """
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens must be None or at least 0, got {max_tokens}")
        key = page_key(token_ids)
        num_tokens = len(key) // TOKEN_BYTES
        if not self.config.enable_prefix_caching:
            return CacheMatch(num_tokens, 0, [], self._open(self._tree.root, 0, extra_key))
        pages, node = self._tree.match(key if max_tokens is None else key[: max_tokens * TOKEN_BYTES], extra_key)
        result = CacheMatch(
            num_tokens, len(pages) * self.config.page_size, pages, self._open(node, len(pages), extra_key)
        )
        self._count(result, 1)
        return result

    def has_next_page(self, handle: PrefixHandle, token_ids: Sequence[int] | bytes) -> bool:
        """Whether the page of these tokens, which follow what `handle` covers, is cached."""
        key = page_key(token_ids)
        self._check_open(handle)
        return self._tree.count_present(handle.node, key[: self._page_bytes], handle.extra_key) > 0

    def extend(
        self, handle: PrefixHandle, token_ids: Sequence[int] | bytes, pages: Sequence[int], *, priority: int = 0
    ) -> PrefixInsertResult:
        """Publish the computed pages that follow those that `handle` covers, and let it cover them too.

        The cost does not depend on what the handle covers already.

        Args:
            token_ids, pages: the new tokens and pages only, from page `handle.num_pages` on. Tokens beyond whole pages
                are ignored.
            priority: read by the eviction policy "priority".

        Raises:
            ValueError: `pages` are not as many as the tokens' whole pages, a page to take over is not held, or the
                handle is released. Nothing is changed then.
        """
        key = page_key(token_ids)
        self._check_open(handle)
        if not self.config.enable_prefix_caching:
            return PrefixInsertResult([], [])
        self._tree.check_count(key, pages)
        present = self._tree.count_present(handle.node, key, handle.extra_key)
        taken = list(pages[present:])
        self.allocator.cache(taken)
        last = handle.node.pages[-1] if handle.num_pages else None  # the node may grow
        inserted = self._tree.extend(handle.node, key, pages, handle.extra_key, priority=priority)
        if self.events is not None and taken:
            before = inserted.pages[present - 1] if present else last
            self.events.stored(before, key[present * self._page_bytes :], taken, handle.extra_key)
        handle.node = inserted.node
        handle.num_pages += len(pages)
        self._stats.tokens_inserted += len(taken) * self.config.page_size
        self._keep_to_limit()
        return PrefixInsertResult(
            taken, [own for own, cached in zip(pages, inserted.pages, strict=True) if own != cached]
        )

    def insert(
        self,
        token_ids: Sequence[int] | bytes,
        pages: Sequence[int],
        handle: PrefixHandle | None = None,
        extra_key: Hashable = None,
        *,
        priority: int = 0,
    ) -> PrefixInsertResult:
        """Publish a sequence from its first token: with a handle like `extend`; without one, nothing stays locked.

        Args:
            token_ids, pages: those of the whole sequence; what the handle covers is skipped.
            extra_key: the namespace, if there is no handle.

        Raises:
            ValueError: as for `extend`; or the sequence does not begin with the handle's prefix, or `extra_key` is not
                the handle's.
        """
        key = page_key(token_ids)
        if handle is None:
            handle = self._open(self._tree.root, 0, extra_key)
            try:
                return self.extend(handle, key, pages, priority=priority)
            finally:
                self.release(handle)
        self._check_open(handle)
        if extra_key is not None and extra_key != handle.extra_key:
            raise ValueError(f"extra_key must be the handle's {handle.extra_key!r}, got {extra_key!r}")
        if not key.startswith(self._tree.path_key(handle.node)):
            raise ValueError(f"token_ids must begin with the {handle.num_pages} pages that the handle covers")
        rest = key[handle.num_pages * self._page_bytes :]
        return self.extend(handle, rest, pages[handle.num_pages :], priority=priority)

    def release(self, handle: PrefixHandle) -> None:
        """Close a handle: the pages that it covered stay cached, and may be evicted unless another handle covers them.

        Raises:
            ValueError: the handle is released already.
        """
        self._check_open(handle)
        handle.is_open = False
        self._tree.unlock(handle.node)
        self._keep_to_limit()

    def cancel(self, result: CacheMatch) -> None:
        """Release an unused match, and take it out of the counts, including the hits of the nodes that it found.

        Raises:
            ValueError: the match is released already.
        """
        self._check_open(result.handle)
        if self.config.enable_prefix_caching:
            self._count(result, -1)
            self._tree.take_back(result.handle.node)
        self.release(result.handle)

    def evict(self, num_pages: int) -> int:
        """Evict as `evict_pages` does. Other caches give this name to what `evict_to_tokens` does."""
        warnings.warn("PrefixCache.evict is called evict_pages now", DeprecationWarning, stacklevel=2)
        return self.evict_pages(num_pages)

    def evict_to_tokens(self, num_tokens: int) -> int:
        """Evict until at most `num_tokens` tokens are cached, or all that are cached are in use.

        Returns:
            The number of pages freed.
        """
        return self.evict_pages(max(0, self._tree.num_pages - max(0, num_tokens) // self.config.page_size))

    def evict_pages(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that no handle covers; return their number."""
        freed = self._tree.evict(num_pages)
        self._give_back(freed)
        if freed:
            self._stats.eviction_count += 1
            self._stats.tokens_evicted += len(freed) * self.config.page_size
        return len(freed)

    def remove(self, token_ids: Sequence[int] | bytes, extra_key: Hashable = None) -> int:
        """Remove a sequence: free the pages at its end that no other sequence shares and no handle covers.

        Returns their number. Pages in use, and prefixes that other sequences continue, stay.
        """
        freed = self._tree.remove(token_ids, extra_key)
        self._give_back(freed)
        return len(freed)

    def clear(self) -> int:
        """Free all pages that no handle covers; return their number. `num_pages` then counts the pages left in use."""
        freed = self._tree.clear()
        self._give_back(freed)
        return len(freed)

    def continue_events(self, events: PageEvents | None) -> None:
        """Tell of pages what an earlier cache did, whose pages are gone."""
        self.events = events
        if events is not None:
            events.cleared()

    def _give_back(self, pages: Sequence[int]) -> None:
        self.allocator.free_cached(pages)
        if self.events is not None:
            self.events.removed(pages)

    def dump(self, show: Callable[[list[int]], str] | None = None) -> str:
        """Draw the tree; `show` formats a node's tokens, for instance as text."""
        return self._tree.dump(show)

    def get_tree_stats(self) -> TreeStats:
        """Return the size of the tree: nodes, depth, tokens, pages. Visits every node; `stats` counts its use."""
        return self._tree.get_stats()

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree and allocator are sound and know the same number of cached pages."""
        self._tree.check_integrity()
        self.allocator.check_integrity()
        cached, known = self.allocator.num_cached, self._tree.num_pages
        assert cached == known, f"{cached} pages are marked as cached, the tree has {known}"

    def _open(self, node: RadixNode, num_pages: int, extra_key: Hashable) -> PrefixHandle:
        self._tree.lock(node)
        return PrefixHandle(node, num_pages, extra_key)

    def _check_open(self, handle: PrefixHandle) -> None:
        if not handle.is_open:
            raise ValueError("handle must be open, got one that is released already")

    def _count(self, result: CacheMatch, sign: int) -> None:
        self._stats.total_requests += sign
        self._stats.cache_hits += sign * result.cache_hit
        self._stats.total_tokens_processed += sign * result.num_tokens
        self._stats.tokens_reused += sign * result.num_cached_tokens

    def _keep_to_limit(self) -> None:
        # Pages that requests use cannot be evicted, and would not be free for others if they were.
        if self._max_pages is not None and self._tree.num_pages > self._max_pages:
            self.evict_pages(self._tree.num_pages - self._max_pages)


# The sources' names, by which they were known here before.
PrefixCacheConfig, PrefixMatchResult = CacheConfig, CacheMatch

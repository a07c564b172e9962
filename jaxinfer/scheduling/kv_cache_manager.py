"""The pages of each request: its lane over the pool, the cached prefix included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import CacheMatch, PrefixCache
from jaxinfer.cache.radix_node import TOKEN_BYTES, page_key
from jaxinfer.scheduling.request import Request


class KVCacheManager:
    """Gives pages to requests, and shares full pages through the prefix cache if there is one.

    A request's lane begins with the pages that it found in the cache. It publishes the pages that it computes after
    them as they fill, and keeps a lock on all of these while it runs. Launches run in order on the device, and within
    one all KV of a layer is written before any is read: so a page may be published as soon as the launch that fills it
    is planned, and a request that finds it may join that same launch.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, cache: PrefixCache | None = None, block_size: int = 1
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.page_size = page_size
        self.cache = cache
        self.num_weights = 0  # counts changes of the weights: part of the cache's namespace

    @property
    def num_slots(self) -> int:
        return self.allocator.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that are free, or that eviction could free."""
        return self.allocator.num_free + (self.cache.num_evictable if self.cache is not None else 0)

    def num_in_chunks(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` known tokens are computed as prompt chunks: whole blocks only."""
        return num_tokens // self.block_size * self.block_size

    def num_settled(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` landed tokens are computed for good: all but the last, or whole blocks."""
        return num_tokens - 1 if self.block_size == 1 else self.num_in_chunks(num_tokens)

    def missing_pages(self, request: Request, num_tokens: int) -> int:
        """Return how many pages the request lacks to hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.page_size) - len(request.pages))

    def find_prefix(self, request: Request) -> None:
        """Let a request without pages begin with the longest cached prefix of its tokens, the last token excepted (with
        blocks, of its whole blocks); or with its trunk, if that is longer."""
        request.num_weights = self.num_weights
        if request.trunk is not None and self._is_stale(request.trunk):
            request.trunk, request.shares_lane = None, False  # it is kept for those that run
        trunk = request.trunk
        if self.cache is not None and request.publishes:
            wanted = request.token_ids[: request.most_cached_tokens]
            most = len(wanted) if request.is_trunk else min(len(wanted), self.num_settled(request.num_tokens))
            namespace = (request.cache_key, request.rope_length, self.num_weights)
            found = self.cache.match_and_lock(wanted, namespace, max_tokens=most)
            request.prefix, request.pages = found, list(found.pages)
            request.num_computed_tokens = request.num_published_tokens = found.num_cached_tokens
        if trunk is not None and request.num_computed_tokens < trunk.num_tokens:
            self.forgo_prefix(request)
            request.pages, request.num_borrowed_pages = list(trunk.pages), len(trunk.pages)
            request.num_computed_tokens = trunk.num_tokens

    def forgo_prefix(self, request: Request) -> None:
        """Undo `find_prefix` for a request that could not be admitted."""
        if self.cache is not None and request.prefix is not None:
            self.cache.cancel(request.prefix)
        request.prefix, request.pages, request.num_borrowed_pages = None, [], 0
        request.num_computed_tokens = request.num_published_tokens = 0

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Add the pages that the request needs to hold `num_tokens`, and return them; None, and no change, if too few
        are available."""
        missing = self.missing_pages(request, num_tokens)
        lacking = missing - self.allocator.num_free
        if lacking > 0:
            if self.cache is None or lacking > self.cache.num_evictable:
                return None
            self.cache.evict_pages(lacking)
        pages = self.allocator.allocate(missing)
        request.pages += pages
        return pages

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]] | None:
        """Let `child`, which has no pages, begin with what `parent` has computed: full pages are shared, the partly
        filled page after them is to be copied.

        Returns:
            Source and destination slots of the copy; None, and no change, if there is no page for it.
        """
        size, computed = self.page_size, parent.num_computed_tokens
        shared = parent.pages[: computed // size]
        assert not parent.publishes and not child.publishes, "cached pages have no holders to count"
        child.pages, child.num_borrowed_pages = list(shared), min(parent.num_borrowed_pages, len(shared))
        self.allocator.share(self._held(child))
        if self.grow(child, computed) is None:
            self.release(child)
            return None
        child.num_computed_tokens = computed
        source, destination = parent.pages[len(shared) :], child.pages[len(shared) :]
        moves = [
            (source[0] * size + offset, destination[0] * size + offset)
            for offset in range(computed - len(shared) * size)
        ]
        self.allocator.copied(moves)
        return moves

    def publish(self, request: Request, num_tokens: int) -> None:
        """Hand the cache the full pages of the request's first `num_tokens`, which are computed or about to be.

        If the cache has an equal page already, the request keeps its own and publishes no more until it is released: a
        lock on both pages would double what it holds of a small pool.
        """
        if self.cache is None or request.prefix is None or request.has_twin or self._is_stale(request):
            return
        key = self._unpublished(request, num_tokens)
        if key:
            request.has_twin = self.cache.has_next_page(request.prefix.handle, key)
            if not request.has_twin:
                self._extend(self.cache, request.prefix, request, key)

    def release(self, request: Request) -> None:
        """Take back all pages of a request; full pages that it computed stay cached until they are evicted."""
        own: list[int] = []
        if self.cache is not None and request.prefix is not None:
            # The latest token may have been sampled in the last step that ran: then it is not computed.
            settled = request.num_tokens if request.is_trunk else self.num_settled(request.num_tokens)
            is_stale, handle = self._is_stale(request), request.prefix.handle
            if not is_stale:
                key = self._unpublished(request, min(request.num_computed_tokens, settled))
                own = self._extend(self.cache, request.prefix, request, key)
            self.cache.release(handle)
            if is_stale:  # these pages are of no use any more
                self.cache.remove(request.token_ids[: request.num_published_tokens], handle.extra_key)
        own += self._held(request)
        self.allocator.free(own)
        request.pages, request.num_borrowed_pages = [], 0
        request.prefix, request.num_published_tokens, request.has_twin = None, 0, False

    def discard(self, request: Request) -> None:
        """Take back all pages of a request whose keys and values may be broken, and uncache those that only it uses."""
        published, prefix = request.token_ids[: request.num_published_tokens], request.prefix
        request.num_computed_tokens = 0
        self.release(request)
        if self.cache is not None and prefix is not None and published:
            self.cache.remove(published, prefix.handle.extra_key)

    def begin_namespace(self) -> None:
        """Let the weights have changed: cached pages are found no more, and those that no request reads are free."""
        self.num_weights += 1
        if self.cache is not None:
            self.cache.clear()
            self.cache.continue_events(self.cache.events)  # pages that requests still read are found no more

    def _is_stale(self, request: Request) -> bool:
        """Whether a request has begun with earlier weights."""
        return request.num_weights != self.num_weights

    def _held(self, request: Request) -> list[int]:
        """Pages that are the request's own, neither cached nor its trunk's."""
        return request.pages[max(request.num_published_tokens // self.page_size, request.num_borrowed_pages) :]

    def _unpublished(self, request: Request, num_tokens: int) -> bytes:
        """Return the key of the whole pages of its first `num_tokens` that the request has not published."""
        last = num_tokens // self.page_size * self.page_size
        return page_key(request.token_ids[request.num_published_tokens : last])

    def _extend(self, cache: PrefixCache, prefix: CacheMatch, request: Request, key: bytes) -> list[int]:
        """Publish the request's next pages, whose tokens are `key`; return those that stay its own."""
        first = request.num_published_tokens // self.page_size
        num_tokens = len(key) // TOKEN_BYTES
        pages = request.pages[first : first + num_tokens // self.page_size]
        request.num_published_tokens += num_tokens
        return cache.extend(prefix.handle, key, pages, priority=-request.priority).duplicates

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raise AssertionError unless every page is free, cached, or held by as many of these requests as counted."""
        self.allocator.check_integrity()
        held: list[int] = []
        for request in running:
            assert not self.missing_pages(request, request.num_computed_tokens), "computed tokens without pages"
            held += self._held(request)
        for page, count in Counter(held).items():
            holders = self.allocator.num_holders(page)
            assert holders == count, f"page {page} has {holders} holders, {count} requests hold it"
        known = len(set(held))
        assert known == self.allocator.num_held, f"{self.allocator.num_held} pages held, requests know {known}"
        if self.cache is not None:
            self.cache.check_integrity()

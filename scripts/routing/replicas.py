"""Replicas without a model: the engine's own prefix cache over an allocator, and how long a request takes."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import CacheConfig, CacheMatch, PrefixCache
from jaxinfer.cache.radix_node import TOKEN_BYTES


@dataclass
class Running:
    """A request on its replica: its locked prefix, and the pages that the cache did not take."""

    match: CacheMatch
    own_pages: list[int]


class Replica:
    """One engine's pool.

    Args:
        num_pages: of the pool.
        page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(CacheConfig(page_size=page_size), self.allocator)

    def begin(self, prompt: bytes, whole: bytes) -> Running | None:
        """Match a prompt, and take pages for it and its answer; None: they are all in use.

        Args:
            prompt: the key of its tokens.
            whole: the key of prompt and answer.
        """
        most = len(prompt) // TOKEN_BYTES - 1
        match = self.cache.match_and_lock(prompt, max_tokens=most)
        missing = -(-len(whole) // (self.page_size * TOKEN_BYTES)) - len(match.pages)
        if missing > self.cache.free_pages:
            self.cache.cancel(match)
            return None
        if missing > self.allocator.num_free:
            self.cache.evict_pages(missing - self.allocator.num_free)
        own = self.allocator.allocate(missing)
        return Running(match, self._publish(match, prompt, own))

    def end(self, running: Running, whole: bytes) -> None:
        """Publish the answer of a request, and release what it holds."""
        left = self._publish(running.match, whole, running.own_pages)
        self.allocator.free(left)
        self.cache.release(running.match.handle)

    def _publish(self, match: CacheMatch, key: bytes, own: list[int]) -> list[int]:
        """Publish whole pages that the handle does not cover; return the pages that are still the request's own."""
        handle, width = match.handle, self.page_size * TOKEN_BYTES
        rest = key[handle.num_pages * width :]
        count = len(rest) // width
        if not count or self.cache.has_next_page(handle, rest):
            return own
        self.cache.extend(handle, rest[: count * width], own[:count])
        return own[count:]

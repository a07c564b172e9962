"""In which state every page of the pool is: free, held by requests or kept by the cache; every misuse is an error."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

_HELD, _FREE, _CACHED = range(3)
_NAMES = ("held", "free", "cached")


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out page ids 0..num_pages-1; a page is free, held or cached: free + held + cached = total.

    A held page belongs to one request. A cached one belongs to the prefix cache, however many requests read it.
    Methods may be called from any thread.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        # A heap: the lowest page is handed out first, so that pages of a sequence are neighbours in memory, too, as far
        # as there are any. A CPU reads those a tenth faster than pages from anywhere.
        self._free = list(range(num_pages))
        self._state = bytearray((_FREE,)) * num_pages
        self._num_cached = 0
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - self._num_cached

    def allocate(self, count: int) -> list[int]:
        """`count` page ids that nobody else holds, in ascending order.

        Raises:
            OutOfPagesError: fewer than `count` pages are free; nothing is taken then.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        with self._lock:
            if count > len(self._free):
                raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
            pages = [heappop(self._free) for _ in range(count)]
            for page in pages:
                self._state[page] = _HELD
            return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take held pages back.

        Raises:
            ValueError: a page is out of range, free already, or cached.
        """
        with self._lock:
            for page in pages:
                self._check(page, _HELD, "freed")
                self._state[page] = _FREE
                heappush(self._free, page)

    def cache(self, pages: Sequence[int]) -> None:
        """Hand held pages over to the prefix cache: all of them, or none when it raises.

        Raises:
            ValueError: a page is out of range, not held, or stands twice in `pages`.
        """
        with self._lock:
            for done, page in enumerate(pages):
                try:
                    self._check(page, _HELD, "cached")
                except ValueError:
                    for earlier in pages[:done]:
                        self._state[earlier] = _HELD
                    raise
                self._state[page] = _CACHED
            self._num_cached += len(pages)

    def free_cached(self, pages: Iterable[int]) -> None:
        """Take back pages that the prefix cache has given up.

        Raises:
            ValueError: a page is out of range or not cached.
        """
        with self._lock:
            for page in pages:
                self._check(page, _CACHED, "evicted")
                self._state[page] = _FREE
                heappush(self._free, page)
                self._num_cached -= 1

    def _check(self, page: int, state: int, verb: str) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not in a pool of {self.num_pages}")
        found = self._state[page]
        if found == state:
            return
        if found == _FREE and verb == "freed":
            raise ValueError(f"page {page} is freed twice")
        raise ValueError(f"page {page} must be {_NAMES[state]} to be {verb}, it is {_NAMES[found]}")

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free list and the pages' states tell the same story."""
        assert len(self._free) == self._state.count(_FREE), "free list and states disagree on the count"
        assert all(self._state[page] == _FREE for page in self._free), "a page in the free list is held or cached"
        assert len(set(self._free)) == len(self._free), "a page stands twice in the free list"
        assert self._num_cached == self._state.count(_CACHED), "miscounted cached pages"

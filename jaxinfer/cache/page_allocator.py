"""The state of every page of the pool: free, held by requests, or cached. Every misuse is an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

_HELD, _FREE, _CACHED = range(3)
_NAMES = ("held", "free", "cached")


class OutOfPagesError(RuntimeError):
    """More pages were requested than are free."""


class PageAllocator:
    """The allocator of page ids 0..num_pages-1. A page is free, held or cached: free + held + cached = total.

    A held page has a count of holders: one or, among lanes that share it, several. It is free again when the last
    holder frees it. A cached page belongs to the prefix cache, however many requests read it: they hold a lock there,
    and nothing here. Not thread-safe: one caller drives it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        # A heap: the lowest page is handed out first, so that the pages of a sequence are adjacent in memory where
        # possible. A CPU reads adjacent pages a tenth faster than scattered ones.
        self._free = list(range(num_pages))
        self._state = bytearray((_FREE,)) * num_pages
        self._shared: dict[int, int] = {}  # the number of holders of pages that have several
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Held pages; a page with several holders counts once."""
        return self.num_pages - len(self._free) - self._num_cached

    def num_holders(self, page: int) -> int:
        """Return the number of holders of a page: 0 if it is free or cached.

        Raises:
            ValueError: the page is out of range.
        """
        if not 0 <= page < self.num_pages:
            raise self._out_of_range(page)
        return self._shared.get(page, 1) if self._state[page] == _HELD else 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages and return their ids in ascending order; the caller is the only holder of each.

        Raises:
            OutOfPagesError: fewer than `count` pages are free; nothing is taken then.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        pages = [heappop(self._free) for _ in range(count)]
        for page in pages:
            self._state[page] = _HELD
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of these held pages: to all of them, or to none if it raises.

        A page that is several times in `pages` gets as many holders.

        Raises:
            ValueError: a page is out of range or not held.
        """
        for page in pages:
            self._check(page, _HELD, "shared")
        for page in pages:
            self._shared[page] = self._shared.get(page, 1) + 1

    def free(self, pages: Iterable[int]) -> None:
        """Remove one holder of each page; a page without holders is free again.

        Raises:
            ValueError: a page is out of range, free already, or cached.
        """
        for page in pages:
            if page in self._shared:
                self._drop_holder(page)
                continue
            self._check(page, _HELD, "freed")
            self._state[page] = _FREE
            heappush(self._free, page)

    def cache(self, pages: Sequence[int]) -> None:
        """Hand held pages over to the prefix cache: all of them, or none if it raises.

        The cache may evict a page that has no lock. A second holder would not know of that, and so only the sole holder
        of a page can hand it over.

        Raises:
            ValueError: a page is out of range, not held, has several holders, or is twice in `pages`.
        """
        for done, page in enumerate(pages):
            try:
                self._check(page, _HELD, "cached")
                if page in self._shared:
                    raise ValueError(f"page {page} must have 1 holder to be cached, it has {self._shared[page]}")
            except ValueError:
                for earlier in pages[:done]:
                    self._state[earlier] = _HELD
                raise
            self._state[page] = _CACHED
        self._num_cached += len(pages)

    def free_cached(self, pages: Iterable[int]) -> None:
        """Free pages that the prefix cache has evicted.

        Raises:
            ValueError: a page is out of range or not cached.
        """
        for page in pages:
            self._check(page, _CACHED, "evicted")
            self._state[page] = _FREE
            heappush(self._free, page)
            self._num_cached -= 1

    def copied(self, moves: Sequence[tuple[int, int]]) -> None:
        """Note that slots are copied, from the first to the second of each pair. No page changes its state."""

    def _drop_holder(self, page: int) -> None:
        """Remove one holder of a page that has several."""
        self._shared[page] -= 1
        if self._shared[page] == 1:
            del self._shared[page]

    def _out_of_range(self, page: int) -> ValueError:
        return ValueError(f"page {page} is not in a pool of {self.num_pages}")

    def _check(self, page: int, state: int, verb: str) -> None:
        if not 0 <= page < self.num_pages:
            raise self._out_of_range(page)
        found = self._state[page]
        if found == state:
            return
        if found == _FREE and verb == "freed":
            raise ValueError(f"page {page} is freed twice")
        raise ValueError(f"page {page} must be {_NAMES[state]} to be {verb}, it is {_NAMES[found]}")

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list and the pages' states agree."""
        assert len(self._free) == self._state.count(_FREE), "free list and states disagree on the count"
        assert all(self._state[page] == _FREE for page in self._free), "a page in the free list is held or cached"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert self._num_cached == self._state.count(_CACHED), "miscounted cached pages"
        assert all(self._state[page] == _HELD for page in self._shared), "a page that is not held has holders"
        assert all(count > 1 for count in self._shared.values()), "a page of one holder is among those of several"

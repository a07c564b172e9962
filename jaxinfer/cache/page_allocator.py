"""Which pages of the pool are free: a stack of page ids, with every misuse an error."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Hands out page ids 0..num_pages-1; a page is free or held, never both."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        # A stack: the page freed last is handed out first, while its memory may still be warm.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` page ids that nobody else holds.

        Raises:
            OutOfPagesError: fewer than `count` pages are free; nothing is taken then.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        if count == 0:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back.

        Raises:
            ValueError: a page is out of range or free already.
        """
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not in a pool of {self.num_pages}")
            if self._is_free[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free list and the free marks tell the same story."""
        assert len(self._free) == sum(self._is_free), "free list and free marks disagree on the count"
        assert all(self._is_free[page] for page in self._free), "a page in the free list is marked held"
        assert len(set(self._free)) == len(self._free), "a page stands twice in the free list"

"""A log of what happens to pages, on if JAXINFER_LOG names "memory" or the logger `jaxinfer.memory` logs at DEBUG."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

from jaxinfer.cache.page_allocator import PageAllocator

logger = logging.getLogger("jaxinfer.memory")

VARIABLE, WORD = "JAXINFER_LOG", "memory"
_MOST_NAMED = 8  # page ids in a line


def make_page_allocator(num_pages: int, page_bytes: int) -> PageAllocator:
    """Return an allocator, which logs if that is asked for; without a log nothing is added to any call."""
    if WORD in os.environ.get(VARIABLE, "").split(","):
        logger.setLevel(logging.DEBUG)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
    return (
        LoggedPageAllocator(num_pages, page_bytes) if logger.isEnabledFor(logging.DEBUG) else PageAllocator(num_pages)
    )


class LoggedPageAllocator(PageAllocator):
    """Allocator that logs every change of a page's state, with sizes, at DEBUG."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        super().__init__(num_pages)
        self._page_bytes = page_bytes
        logger.debug("pool: %d pages of %d bytes", num_pages, page_bytes)

    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        self._log("allocate", pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        super().share(pages)
        self._log("share", pages)

    def free(self, pages: Iterable[int]) -> None:
        given = list(pages)
        super().free(given)
        self._log("free", given)

    def cache(self, pages: Sequence[int]) -> None:
        super().cache(pages)
        self._log("commit to the prefix cache", pages)

    def free_cached(self, pages: Iterable[int]) -> None:
        given = list(pages)
        super().free_cached(given)
        self._log("evict from the prefix cache", given)

    def copied(self, moves: Sequence[tuple[int, int]]) -> None:
        if moves:
            logger.debug("copy: %d slots for a fork, from %d to %d", len(moves), *moves[0])

    def _log(self, what: str, pages: Sequence[int]) -> None:
        if pages:
            named = ", ".join(map(str, pages[:_MOST_NAMED])) + (", ..." if len(pages) > _MOST_NAMED else "")
            logger.debug(
                "%s: %d pages, %d bytes (%s); %d free, %d held, %d cached",
                what, len(pages), len(pages) * self._page_bytes, named, self.num_free, self.num_held, self.num_cached,
            )  # fmt: skip

"""Events of a prefix cache: which pages of tokens were stored and removed, for routers that send requests to them.

A page has the same hash as long as its tokens, those before it and its namespace are the same. What only one user may
find, by a salt, is not told.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from jaxinfer.cache.radix_node import TOKEN_BYTES


@dataclass(frozen=True)
class PagesStored:
    """Pages that follow each other.

    Attributes:
        hashes: of the pages, unsigned 64-bit.
        parent: hash of the page before them; None: they begin a sequence.
        token_ids: of all of them.
    """

    hashes: list[int]
    parent: int | None
    token_ids: list[int]


@dataclass(frozen=True)
class PagesRemoved:
    """Pages that are found no more."""

    hashes: list[int]


@dataclass(frozen=True)
class AllCleared:
    """No page that was told of is found any more."""


type PageEvent = PagesStored | PagesRemoved | AllCleared


class PageEvents:
    """Events since they were taken last. The engine's thread adds them, and any thread takes them.

    Args:
        page_size: tokens of a page.
        is_shared: whether the pages of a namespace are told of.
    """

    def __init__(self, page_size: int, is_shared: Callable[[Hashable], bool] = lambda namespace: True) -> None:
        self.page_size = page_size
        self._is_shared = is_shared
        self._hash_of: dict[int, int] = {}  # of pages that were told of
        self._events: list[PageEvent] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def take(self, timeout: float = 0.0) -> list[PageEvent]:
        """Return the events in order, and forget them.

        Args:
            timeout: seconds to wait for the first one.
        """
        with self._changed:
            if not self._events:
                self._changed.wait(timeout)
            events, self._events = self._events, []
        return events

    def stored(self, before: int | None, key: bytes, pages: Sequence[int], namespace: Hashable) -> None:
        """Note pages that the cache has taken.

        Args:
            before: the page before them; None: they begin a sequence.
            key: of their tokens, see `page_key`.
            namespace: part of what their hashes are made of.
        """
        parent = None if before is None else self._hash_of.get(before)
        if not self._is_shared(namespace) or (before is not None and parent is None):
            return  # nothing finds it, if what is before it was cleared
        width, hashes, last = self.page_size * TOKEN_BYTES, list[int](), parent
        for number, page in enumerate(pages):
            begins = repr(namespace).encode() if last is None else last.to_bytes(8)
            part = key[number * width : (number + 1) * width]
            last = int.from_bytes(hashlib.blake2b(begins + b"\0" + part, digest_size=8).digest())
            self._hash_of[page] = last
            hashes.append(last)
        tokens = array("i", key[: len(pages) * width]).tolist()
        self._add(PagesStored(hashes, parent, tokens))

    def removed(self, pages: Sequence[int]) -> None:
        """Note pages that the cache has given back."""
        hashes = [self._hash_of.pop(page) for page in pages if page in self._hash_of]
        if hashes:
            self._add(PagesRemoved(hashes))

    def cleared(self) -> None:
        """Note that no page is found any more."""
        self._hash_of.clear()
        self._add(AllCleared())

    def close(self) -> None:
        """Keep no more events: nothing takes them."""
        with self._changed:
            self._is_closed = True
            self._events.clear()

    def _add(self, event: PageEvent) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._events.append(event)
            self._changed.notify()

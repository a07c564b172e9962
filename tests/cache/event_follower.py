"""A follower of the events of a prefix cache, that knows of it what a router can know."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.cache.page_events import AllCleared, PageEvent, PagesRemoved, PagesStored


class Follower:
    """A router's view of one cache, made of its events alone.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.children: dict[tuple[int | None, tuple[int, ...]], set[int]] = {}
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def follow(self, events: Sequence[PageEvent]) -> None:
        for event in events:
            if isinstance(event, AllCleared):
                self.children.clear()
                self.known.clear()
            elif isinstance(event, PagesRemoved):
                for page in event.hashes:
                    self.children[self.known.pop(page)].discard(page)
            else:
                assert isinstance(event, PagesStored) and len(event.token_ids) == self.size * len(event.hashes)
                parent = event.parent
                assert parent is None or parent in self.known
                for number, page in enumerate(event.hashes):
                    place = parent, tuple(event.token_ids[number * self.size : (number + 1) * self.size])
                    assert page not in self.known
                    self.known[page] = place
                    self.children.setdefault(place, set()).add(page)
                    parent = page

    def find(self, tokens: list[int]) -> int:
        """Return how many tokens are cached, in any namespace that is told of."""
        places: set[int | None] = {None}
        for start in range(0, len(tokens) - self.size + 1, self.size):
            page = tuple(tokens[start : start + self.size])
            places = {each for place in places for each in self.children.get((place, page), ())}
            if not places:
                return start
        return len(tokens) // self.size * self.size

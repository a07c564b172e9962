"""Searches, which steer requests token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.scheduling.request import Request


class Search(Protocol):
    """Chooses, once the latest tokens of all its requests have landed, how each continues."""

    @property
    def beams(self) -> Sequence[Request]:
        """The requests that it steers now. A recovery aborts steered requests that no search names."""
        ...

    def advance(self) -> bool:
        """Choose, if all have landed; return whether it did."""
        ...

    def restore(self) -> None:
        """Bring the requests back to the latest choice, however far it was carried out."""
        ...


def advance_all(searches: Sequence[Search]) -> bool:
    """Let searches choose whose requests have landed; return whether any did."""
    return any([search.advance() for search in list(searches)])

"""What steers requests, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.scheduling.request import Request


class Search(Protocol):
    """Chooses, once the latest tokens of all its requests have landed, how each continues."""

    @property
    def beams(self) -> Sequence[Request]:
        """The requests that it steers now. The engine drops others that are steered."""
        ...

    def advance(self) -> bool:
        """Choose, if all have landed; whether it did."""
        ...

    def restore(self) -> None:
        """Let the requests be as the latest choice has them, whatever was made of it."""
        ...

"""What is to be done between steps: requests that arrive, aborts, anything that changes what only steps may touch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _Note:
    function: Callable[[], None]
    has_failed: bool = False


class Notes:
    """A queue of functions. `add` may be called at any moment, also while a note is taken, by any thread.

    A function may be called again if it was interrupted, so it must do no harm the second time.
    """

    def __init__(self) -> None:
        self._queue: deque[_Note] = deque()
        self._bell = threading.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, function: Callable[[], None]) -> None:
        self._queue.append(_Note(function))
        self._bell.set()

    def take(self) -> bool:
        """Call what is queued, in order; whether there was anything.

        A note leaves the queue when its function has returned, or has raised an `Exception` for the second time, which
        is raised.
        """
        found = bool(self._queue)
        while self._queue:
            note = self._queue[0]
            try:
                note.function()
            except Exception:
                if note.has_failed:
                    self._queue.popleft()
                note.has_failed = True
                raise
            self._queue.popleft()
        return found

    def wait(self, timeout: float) -> None:
        """Wait for a note, for so many seconds at most."""
        self._bell.clear()
        if not self._queue:
            self._bell.wait(timeout)

"""Work to do between steps: requests that arrive, aborts, anything that changes what only steps may touch."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _Note:
    function: Callable[[], None]
    has_failed: bool = False


class Notes:
    """A queue of functions. `add` may be called at any moment, also while a note is taken, by any thread, and by
    finalizers, which may interrupt anything: so `add` is reentrant.

    A function may be called again if it was interrupted, so it must do no harm the second time.
    """

    def __init__(self) -> None:
        self._queue: deque[_Note] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is reentrant

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, function: Callable[[], None]) -> None:
        self._queue.append(_Note(function))
        self._bell.put(None)

    def take(self) -> bool:
        """Call the queued functions in order; return whether there were any. What a function raises is raised.

        A note leaves the queue when its function has returned, or has raised an `Exception` for the second time.
        """
        self._silence()
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
        """Wait for a note, for at most `timeout` seconds."""
        self._silence()
        if not self._queue:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=timeout)

    def _silence(self) -> None:
        """Forget that the bell has rung: what it rang for is in the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._bell.get_nowait()

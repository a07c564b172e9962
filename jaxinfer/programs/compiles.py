"""Notice of compiles, as XLA reports them: of programs, and of operations that run outside of programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

# Loading an executable from disk is reported as well: the launch that needs it waits for that, too.
_EVENT = "/jax/core/compile/backend_compile_duration"
_of_thread = threading.local()


@contextmanager
def hearing_of_compiles(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` for each compile that this thread causes in the context; an exception of `tell` ends the compile."""
    before, _of_thread.tell = getattr(_of_thread, "tell", None), tell
    try:
        yield
    finally:
        _of_thread.tell = before


def is_heard() -> bool:
    """Return whether compiles of this thread are reported: it runs inside `hearing_of_compiles`."""
    return getattr(_of_thread, "tell", None) is not None


def _heard(event: str, duration_secs: float, **details: str | int) -> None:
    tell = getattr(_of_thread, "tell", None)
    if event == _EVENT and tell is not None:
        tell()


jax.monitoring.register_event_duration_secs_listener(_heard)

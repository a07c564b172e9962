"""Lines of the engine as they run: which ones a call executes, and an exception at one of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import jaxinfer

PACKAGE = str(Path(jaxinfer.__file__).parent)
_TOOL = sys.monitoring.PROFILER_ID
_LINE, _NONE = sys.monitoring.events.LINE, sys.monitoring.events.NO_EVENTS


class InjectedError(RuntimeError):
    """What a test lets a line raise."""


class Line(NamedTuple):
    """A line of code, and in how many events it was seen."""

    code: CodeType
    number: int

    @property
    def place(self) -> str:
        return f"{Path(self.code.co_filename).relative_to(PACKAGE)}:{self.number} ({self.code.co_qualname})"


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


class Recording:
    """Counts the lines of jaxinfer that run within `with`."""

    is_armed = True

    def __init__(self) -> None:
        self.counts: Counter[Line] = Counter()

    def _seen(self, code: CodeType, number: int) -> object:
        if not _is_own(code):
            return sys.monitoring.DISABLE
        self.counts[Line(code, number)] += 1
        return None

    def __enter__(self) -> Recording:
        sys.monitoring.use_tool_id(_TOOL, "recording")
        sys.monitoring.register_callback(_TOOL, _LINE, self._seen)
        sys.monitoring.restart_events()
        sys.monitoring.set_events(_TOOL, _LINE)
        return self

    def __exit__(self, *_: object) -> None:
        sys.monitoring.set_events(_TOOL, _NONE)
        sys.monitoring.register_callback(_TOOL, _LINE, None)
        sys.monitoring.free_tool_id(_TOOL)


class Fault:
    """Raises at the given occurrence of a line, once, within `with`.

    Args:
        occurrence: counted from 1.
        error: makes what is raised.
        then: a line, an occurrence of it and an error that follow once this one was raised.
    """

    def __init__(
        self,
        line: Line,
        occurrence: int,
        error: Callable[[], BaseException],
        then: tuple[Line, int, Callable[[], BaseException]] | None = None,
    ) -> None:
        self._next = [(line, occurrence, error)] + ([] if then is None else [then])
        self.lines = [line for line, *_ in self._next]
        self._seen = 0
        self.num_raised = 0

    def __str__(self) -> str:
        return ", then ".join(line.place for line in self.lines)

    @property
    def is_armed(self) -> bool:
        """Whether it has not raised all that it is to raise."""
        return bool(self._next)

    def _at_line(self, code: CodeType, number: int) -> object:
        if not self._next:
            return None
        line, occurrence, error = self._next[0]
        if code is not line.code or number != line.number:
            return None
        self._seen += 1
        if self._seen < occurrence:
            return None
        self._next.pop(0)
        self._seen = 0
        self.num_raised += 1
        raise error()

    def __enter__(self) -> Fault:
        sys.monitoring.use_tool_id(_TOOL, "fault")
        sys.monitoring.register_callback(_TOOL, _LINE, self._at_line)
        self._codes = {line.code for line, *_ in self._next}
        for code in self._codes:
            sys.monitoring.set_local_events(_TOOL, code, _LINE)
        return self

    def __exit__(self, *_: object) -> None:
        for code in self._codes:
            sys.monitoring.set_local_events(_TOOL, code, _NONE)
        sys.monitoring.register_callback(_TOOL, _LINE, None)
        sys.monitoring.free_tool_id(_TOOL)

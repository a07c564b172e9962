"""An engine's warm-up: before requests, or while they run; then threads compile, and steps do what only they may."""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any

from jaxinfer.engine.compile_count import CompileCount
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.warm_up import MOST_THREADS, WarmUp, record, warm_up

logger = logging.getLogger(__name__)


class EngineWarmUp:
    """The warm-up of one engine's programs.

    Args:
        runner: the runner whose programs are compiled and, on a GPU, recorded.
        compiles: marked as warm at the end of a warm-up in the background.
    """

    def __init__(self, runner: Runner, compiles: CompileCount) -> None:
        self._runner, self._compiles = runner, compiles
        self._compiling: WarmUp | None = None  # in the background, until it is over
        self._to_record: deque[tuple[Program, Any]] = deque()

    def run(self, *, progress: bool) -> int:
        """Compile all programs now, in place of a warm-up in the background; return their number."""
        if self._compiling is not None:
            self._compiling.stop()
            self._compiling = None
        return warm_up(self._runner, progress=progress)

    def begin(self) -> None:
        """Compile in the background."""
        # One core is left for the steps.
        self._compiling = WarmUp(self._runner, num_threads=max(1, min((os.cpu_count() or 1) - 1, MOST_THREADS)))
        self._to_record = deque(self._compiling.to_record())

    def go_on(self) -> None:
        """Record the next program, or note that all is done. For the thread that launches, between launches."""
        compiling = self._compiling
        if compiling is None or not compiling.is_over:
            return
        if compiling.error is None and self._to_record:
            record(self._runner, *self._to_record.popleft())
            return
        self._compiling = None
        if compiling.error is None:
            self._compiles.is_warm = True
        else:
            logger.error("warm-up has ended early, and steps compile what they need: %s", compiling.error)

    def cancel(self) -> None:
        """Stop compiling in the background, after the programs that are begun."""
        if self._compiling is not None:
            self._compiling.cancel()

"""Count of what an engine compiles; once the engine is warm, a compile is a fault."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from jaxinfer.engine.errors import CompileAfterWarmUpError
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.programs.compiles import is_heard

logger = logging.getLogger(__name__)


class CompileCount:
    """The count of one engine's compiles.

    Attributes:
        is_warm: whether all programs that requests can need are compiled.
        listeners: called with a description of what a step waits for, before it is compiled.
    """

    def __init__(self, metrics: EngineMetrics, *, is_strict: bool) -> None:
        self.is_warm = False
        self.listeners: list[Callable[[str], None]] = []
        self._metrics, self._is_strict = metrics, is_strict
        self._lock = threading.Lock()
        self._latest = "an operation outside of programs"  # what was traced last, in words

    def traced(self, program: str) -> None:
        """Note that a program is about to be compiled."""
        with self._lock:  # several threads may compile
            self._metrics.num_compiles_total += 1
        if is_heard():
            self._latest = program
            for tell in list(self.listeners):
                tell(program)
        if not self.is_warm:
            logger.debug("compiling: %s", program)
        elif self._is_strict:  # raise before the compile takes its time
            self.compiled()

    def in_update(self, *, is_first: bool) -> None:
        """Note that XLA has compiled something in an update of weights: the first one of a model may.

        Nothing is raised, which would leave an update half done.
        """
        if self.is_warm and not is_first:
            self._metrics.num_compiles_after_warm_up_total += 1
            logger.warning("compiled in an update of weights that is not the first")

    def compiled(self) -> None:
        """Note that XLA has compiled something in a step.

        Raises:
            CompileAfterWarmUpError: the engine is warm and strict.
        """
        if not self.is_warm:
            return
        self._metrics.num_compiles_after_warm_up_total += 1
        if self._is_strict:
            raise CompileAfterWarmUpError(f"compiled after warm-up: {self._latest}")
        logger.warning("compiled after warm-up, which delays running requests: %s", self._latest)

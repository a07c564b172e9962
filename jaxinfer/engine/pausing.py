"""Pauses of an engine, and what becomes of the requests that it has."""

from __future__ import annotations

import weakref
from typing import Protocol

from jaxinfer.engine.transactions import Transactions
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.weights_change import change_weights

PAUSE_MODES = ("keep", "wait", "abort")
GENERATION = "generation was paused: call resume_generation"


class PausingCore(Protocol):
    """What a pause uses of the engine; see `EngineCore`."""

    transactions: Transactions

    @property
    def scheduler(self) -> Scheduler: ...

    def abort(self, *request_ids: str) -> list[Request]: ...

    def land_all(self) -> None: ...

    def why_idle(self) -> str | None: ...


class Pausing:
    """Pauses of generation by the engine's user."""

    def __init__(self, core: PausingCore) -> None:
        self._core = weakref.proxy(core)
        self._mode: str | None = None

    @property
    def is_paused(self) -> bool:
        """Whether nothing may be launched, or only what has begun."""
        return self._mode is not None

    def begin(self, mode: str) -> None:
        """Begin a pause; with "wait" requests that have begun continue to their end.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        core = self._core
        self._mode = mode
        core.transactions.between_steps(core.scheduler.waiting.hold_new)
        if mode == "abort":
            core.abort(*core.transactions.requests)

    def reason(self) -> str | None:
        """Return why nothing is launched; None: something may be."""
        if self._mode is None or (self._mode == "wait" and self.is_waiting):
            return None
        return GENERATION

    @property
    def is_waiting(self) -> bool:
        """Whether requests that have begun are unfinished."""
        return any([each.has_begun and not each.is_finished for each in self._core.transactions.requests.values()])

    def still_waits(self) -> bool:
        """Return whether a pause waits for requests that have begun.

        Raises:
            RuntimeError: they cannot end, as nothing is launched.
        """
        if self._mode != "wait" or not self.is_waiting:
            return False
        reason = self._core.why_idle()
        if reason is not None:
            raise RuntimeError(f"the pause cannot wait for requests that have begun: {reason}")
        return True

    def resume(self, *, recompute_kv: bool) -> None:
        """Let requests continue.

        Args:
            recompute_kv: those that run are computed anew, from all of their tokens.
        """
        core = self._core

        def go_on() -> None:
            if recompute_kv:
                core.land_all()
                change_weights(core.scheduler, recompute=True)
            core.scheduler.waiting.admit_new()

        core.transactions.between_steps(go_on, hands_out=True)
        self._mode = None

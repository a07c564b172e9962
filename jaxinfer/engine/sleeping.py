"""Sleep of an engine: weights and pools leave the device, and requests wait to be computed again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxinfer.engine.transactions import Transactions
from jaxinfer.programs.runner import Runner

TAGS = ("weights", "kv_cache")
_LEVELS = (1, 2)
_ASLEEP = "the engine sleeps: call wake_up"


class SleepingCore(Protocol):
    """What sleep uses of the engine; see `EngineCore`."""

    runner: Runner
    transactions: Transactions

    @property
    def make_state(self) -> Callable[[], Mapping[str, Any]]: ...

    def land_all(self) -> None: ...

    def rebuild(self) -> None: ...


class Sleeping:
    """Sleep of one engine.

    Attributes:
        level: 0: it is awake; 1: owned weights are in the host's memory; 2: they are dropped.
        missing: tags of what has not been woken up.
    """

    def __init__(self, core: SleepingCore) -> None:
        self._core = weakref.proxy(core)
        self.level = 0
        self.missing: frozenset[str] = frozenset()

    @property
    def has_state(self) -> bool:
        """Whether pools and seats are on the device."""
        return "kv_cache" not in self.missing

    def reason(self) -> str | None:
        """Return why nothing is launched; None: the engine is awake."""
        return f"{_ASLEEP} ({', '.join(sorted(self.missing))})" if self.missing else None

    def sleep(self, level: int) -> None:
        """Land what is in flight, and free the memory of owned weights, pools and seats on the device. Requests are
        computed again after waking up; nothing is cached any more.

        Raises:
            ValueError: there is no such level.
            RuntimeError: the engine sleeps already.
        """
        if level not in _LEVELS:
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if self.missing:
            raise RuntimeError(_ASLEEP)
        core = self._core
        core.runner.check_alone("sleep")

        def fall_asleep() -> None:
            core.land_all()
            self.level, self.missing = level, frozenset(TAGS)
            core.rebuild()
            core.transactions.news[:] = core.transactions.requests.values()  # some may have ended
            core.runner.drop_state()
            for weights in core.runner.weights.values():
                weights.leave_device(keep=level == 1)

        core.transactions.between_steps(fall_asleep, hands_out=True)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Bring back what sleeps; what was dropped stays so.

        Raises:
            ValueError: a tag is unknown.
        """
        wanted = checked_tags(tags) & self.missing
        core = self._core

        def wake() -> None:
            if "weights" in wanted:
                for weights in core.runner.weights.values():
                    weights.return_to_device()
            if "kv_cache" in wanted:
                core.runner.state.update(core.make_state())
            self.missing -= wanted
            if not self.missing:
                self.level = 0

        core.transactions.between_steps(wake)


def checked_tags(tags: Sequence[str] | None) -> frozenset[str]:
    """Return tags as a set; None: all.

    Raises:
        ValueError: one is unknown.
    """
    found = frozenset(TAGS if tags is None else tags)
    if unknown := sorted(found - set(TAGS)):
        raise ValueError(f"tags must be among {', '.join(TAGS)}, got {', '.join(unknown)}")
    return found

"""A plugin that prints how long JAX traced, lowered and compiled for each test file of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
MOST_FILES = 12
_SENT = "compile_seconds"


class CompileSeconds:
    """Seconds by file and kind, of this process, and in the end of all processes of the run."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self._file = ""
        self._listens = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._file = item.nodeid.partition("::")[0]
        if not self._listens:
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._add)
            self._listens = True

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in EVENTS:
            self.by_file[f"{self._file} {EVENTS[event]}"] += duration_secs

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        sent: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if sent is not None:
            sent[_SENT] = dict(self.by_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self.by_file.update(getattr(node, "workeroutput", {}).get(_SENT, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.by_file:
            return
        files: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for name, seconds in self.by_file.items():
            file, kind = name.rsplit(" ", 1)
            files[file] += seconds
            kinds[kind] += seconds
        words = ", ".join(f"{kind} {seconds:.0f} s" for kind, seconds in kinds.most_common())
        terminalreporter.section(f"compiling in {len(files)} files: {words}")
        for file, seconds in files.most_common(MOST_FILES):
            terminalreporter.write_line(f"{seconds:7.1f} s {file}")

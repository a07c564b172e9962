"""Progress display while requests run: finished prompts, and the program that is being compiled."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from tqdm import tqdm

from jaxinfer.compile_cache import keeps_compiled_programs
from jaxinfer.outputs import RequestOutput


class CompileWatcher(Protocol):
    """Listener for compiles while requests run."""

    def compiling(self, program: str) -> None:
        """Show that the device waits for the compile of a program, which is described in words."""
        ...

    def compiled(self) -> None:
        """Show that the launch went out and the compile is over."""
        ...


class GenerationProgress:
    """Progress bar of `generate` and `chat`: finished requests, with input and output tokens per second so far."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = tqdm(total=total, disable=not enabled, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._start = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0
        self._is_compiling = False
        self._show_speed(refresh=True)

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._show_speed(refresh=False)
        self._bar.update()

    def compiling(self, program: str) -> None:
        self._is_compiling = True
        self._bar.set_postfix_str(_notice(program))

    def compiled(self) -> None:
        if self._is_compiling:
            self._is_compiling = False
            self._show_speed(refresh=True)

    def _show_speed(self, *, refresh: bool) -> None:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._input_tokens / seconds:.1f} tok/s, output: {self._output_tokens / seconds:.1f} tok/s",
            refresh=refresh,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class CompileNotice:
    """Compile notice for streams, which have no bar: a line on a terminal's stderr, removed after the compile."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def compiling(self, program: str) -> None:
        if not sys.stderr.isatty():
            return
        self.compiled()
        self._bar = tqdm(bar_format="{desc}", desc=_notice(program), leave=False, dynamic_ncols=True)

    def compiled(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _notice(program: str) -> str:
    return f"compiling {program}" + (", kept on disk for the next run" if keeps_compiled_programs() else "")

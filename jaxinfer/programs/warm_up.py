"""Compiling every program that an engine can need, before requests wait for it or while they run."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import jax
from tqdm import tqdm

from jaxinfer.programs.mapped_memory import room_for_programs
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner

# XLA runs a program once without CUDA graphs, records them in the second run, and drops all graphs when it loads
# another program: so the last program's compile is followed by two runs of each.
_RUNS_TO_RECORD = 2
# Python lowers one program at a time while others compile: more threads than this would wait for it.
MOST_THREADS = 8


def warm_up(runner: Runner, *, progress: bool = True) -> int:
    """Compile all of the runner's programs, several at once, the likely ones first, and return their number.

    On a GPU they then run on padding, one after the other, until their CUDA graphs are recorded.

    Raises:
        RuntimeError: Linux has too few memory maps for them, see `room_for_programs`.
    """
    compiling = WarmUp(runner, num_threads=min(os.cpu_count() or 1, MOST_THREADS))
    bar = tqdm(total=compiling.num_programs, desc="Warm-up", unit="program", disable=not progress, dynamic_ncols=True)
    with bar:
        try:
            for program, shape in compiling.compiled():
                bar.set_postfix_str(program.describe(shape))
                bar.update()
        finally:
            compiling.stop()
    for program, shape in compiling.to_record():
        record(runner, program, shape)
    return compiling.num_programs


def by_likelihood(programs: Sequence[Program]) -> Iterator[tuple[Program, Any]]:
    """Yield the smallest shape of each program, then the next of each: programs list their shapes from few to many."""
    for shapes in zip_longest(*([(program, shape) for shape in program.shapes] for program in programs)):
        yield from (found for found in shapes if found is not None)


def record(runner: Runner, program: Program, shape: Any) -> None:
    """Run a program on padding. Only the thread that launches may call this: no other one touches the state."""
    # Wait: each launch in flight holds memory for its inputs and results.
    jax.block_until_ready(runner.launch_idle(program, shape))


class WarmUp:
    """Threads that compile the programs of a runner, the likely ones first. They need shapes alone, and launch nothing.

    When the process ends, they finish what they are compiling and end too.

    Attributes:
        error: the exception that has ended it, if any did.
    """

    def __init__(self, runner: Runner, *, num_threads: int) -> None:
        self._programs = list(by_likelihood(runner.programs))
        self._waiting, self._room, self._num_compiling = self._programs[::-1], 0, 0
        self._turn, self._stop = threading.Condition(), threading.Event()
        self._done: queue.SimpleQueue[tuple[Program, Any] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._compile, args=(runner,), name=f"warm-up {index}")
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    @property
    def is_over(self) -> bool:
        """Whether all threads have ended."""
        return not any([thread.is_alive() for thread in self._threads])

    def compiled(self) -> Iterator[tuple[Program, Any]]:
        """Yield programs as they are compiled.

        Raises:
            Exception: `error`, once all threads have ended.
        """
        running = len(self._threads)
        while running:
            done = self._done.get()
            if done is None:
                running -= 1
            else:
                yield done
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Start no further compile, and wait for those that are running."""
        self.cancel()
        for thread in self._threads:
            thread.join()

    def cancel(self) -> None:
        """Start no further compile."""
        self._stop.set()

    def to_record(self) -> list[tuple[Program, Any]]:
        """Return what to run on padding once all is compiled, in this order; on a CPU nothing."""
        return [] if jax.default_backend() == "cpu" else _RUNS_TO_RECORD * self._programs

    def _compile(self, runner: Runner) -> None:
        try:
            while (found := self._next()) is not None:
                try:
                    runner.compile(*found)
                finally:
                    self._end_compile()
                self._done.put(found)
        except Exception as error:  # `compiled` raises it, and it stays to be read
            self.error = error
            self._stop.set()
        finally:
            self._done.put(None)

    def _next(self) -> tuple[Program, Any] | None:
        with self._turn:
            # Python waits for its threads when it ends, and they can tell that only from the main thread.
            while not self._stop.is_set() and self._waiting and threading.main_thread().is_alive():
                if not self._room:  # counting takes as long as loading a small program
                    # The programs that compile now may need theirs yet.
                    self._room = max(0, room_for_programs() - self._num_compiling)
                if self._room:
                    self._room, self._num_compiling = self._room - 1, self._num_compiling + 1
                    return self._waiting.pop()
                self._turn.wait()
            return None

    def _end_compile(self) -> None:
        with self._turn:
            self._num_compiling -= 1
            self._turn.notify_all()

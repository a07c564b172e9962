"""Compiling every program that an engine can need, before requests wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
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
_MOST_THREADS = 8


def warm_up(runner: Runner, *, progress: bool = True) -> int:
    """Compile all of the runner's programs, several at once, the likely ones first; how many there are.

    On a GPU they then run on padding, one after the other, until their CUDA graphs are recorded.

    Raises:
        RuntimeError: they are more than Linux has memory maps for, see `room_for_programs`.
    """
    programs = list(by_likelihood(runner.programs))
    with tqdm(total=len(programs), desc="Warm-up", unit="program", disable=not progress, dynamic_ncols=True) as bar:
        for program, shape in _compiled(runner, programs):
            bar.set_postfix_str(program.describe(shape))
            bar.update()
    if jax.default_backend() != "cpu":
        for program, shape in _RUNS_TO_RECORD * programs:
            # Launches in flight have their inputs and results allocated, each of them.
            jax.block_until_ready(runner.launch_idle(program, shape))
    return len(programs)


def by_likelihood(programs: Sequence[Program]) -> Iterator[tuple[Program, Any]]:
    """The smallest shape of each program, then the next of each: programs name their shapes from few to many."""
    for shapes in zip_longest(*([(program, shape) for shape in program.shapes] for program in programs)):
        yield from (found for found in shapes if found is not None)


def _compiled(runner: Runner, programs: Sequence[tuple[Program, Any]]) -> Iterator[tuple[Program, Any]]:
    """Programs as they are compiled. Who leaves early waits for those that are being compiled, and no more."""
    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    with ThreadPoolExecutor(threads, "warm-up") as pool:
        waiting, room = list(reversed(programs)), 0
        running: dict[Future[Any], tuple[Program, Any]] = {}
        while waiting or running:
            if not room and not running:  # counting takes as long as loading a small program
                room = room_for_programs()
            while waiting and room and len(running) < threads:
                room, one = room - 1, waiting.pop()
                running[pool.submit(runner.compile, *one)] = one
            done = next(as_completed(running))
            done.result()
            yield running.pop(done)

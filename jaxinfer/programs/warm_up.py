"""Compiling every program that an engine can need, before requests wait for it."""

from __future__ import annotations

import jax
from tqdm import tqdm

from jaxinfer.programs.mapped_memory import room_for_programs
from jaxinfer.programs.runner import Runner

# XLA runs a program once without CUDA graphs, records them in the second run, and drops all graphs when it loads
# another program: so the last program's compile is followed by two runs of each.
_RUNS_TO_RECORD = 2


def warm_up(runner: Runner, *, progress: bool = True) -> int:
    """Compile all of the runner's programs by running each on padding; how many there are.

    On a GPU they then run until their CUDA graphs are recorded.

    Raises:
        RuntimeError: they are more than Linux has memory maps for, see `room_for_programs`.
    """
    programs = [(program, shape) for program in runner.programs for shape in program.shapes]
    room = 0
    with tqdm(programs, desc="Warm-up", unit="program", disable=not progress, dynamic_ncols=True) as bar:
        for program, shape in bar:
            # Counting takes as long as loading a small program.
            room = room - 1 if room > 1 else room_for_programs()
            bar.set_postfix_str(program.describe(shape))
            jax.block_until_ready(runner.launch_idle(program, shape))
    if jax.default_backend() != "cpu":
        for program, shape in _RUNS_TO_RECORD * programs:
            runner.launch_idle(program, shape)
        jax.block_until_ready(runner.state)
    return len(programs)

"""Checkouts that measure the same by turns, each in a process of its own that waits while the others measure.

A machine whose speed changes changes it for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOM = Path(__file__).resolve().parent
ROOT = ROOM.parent.parent


@dataclass
class Side:
    """A process that measures one checkout, and what it has measured so far: numbers by name, for each turn."""

    name: str
    process: subprocess.Popen[str]
    turns: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, checkout: Path, worker: str, *args: int | str) -> Side:
        """Start a program of this room, which reads a number from each line and answers with one of JSON."""
        command = [sys.executable, str(ROOM / worker), *map(str, args)]
        environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return cls(name, process)

    def measure(self, number: int) -> dict[str, float]:
        """Return what the process answers.

        Raises:
            RuntimeError: it has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} has ended with {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def three_sides(checkout: Path, worker: str, *args: int | str) -> Iterator[list[Side]]:
    """This checkout, another one, and this one again, whose difference to itself is the spread, until the end of the
    block; see `Side.start`."""
    sides: list[Side] = []
    try:
        for name, place in (("this", ROOT), ("other", checkout), ("this again", ROOT)):
            sides.append(Side.start(name, place, worker, *args))
        yield sides
    finally:
        for side in sides:
            side.stop()


def take_turns(sides: Sequence[Side], number: int, turns: int) -> None:
    """Let each side measure once for nothing, and then `turns` times by turns."""
    for side in sides:
        side.measure(number)  # compiles
        side.turns.clear()
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            side.turns.append(side.measure(number))


def medians(side: Side) -> dict[str, float]:
    """Return the median over a side's turns of each number."""
    return {name: statistics.median(turn[name] for turn in side.turns) for name in side.turns[0]}


def parser_of(description: str | None, turns: int) -> argparse.ArgumentParser:
    """A parser of what both comparisons ask; `turns` is their default number."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the other commit's checkout")
    parser.add_argument("--turns", type=_turns, default=turns, metavar="N", help="of each side, at least 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser


def _turns(text: str) -> int:
    if (turns := int(text)) < 2:
        raise argparse.ArgumentTypeError("quartiles are taken over turns, so there must be at least 2")
    return turns


def ratios(above: Side, below: Side, name: str) -> list[float]:
    """Return quartiles of one side's number over another one's, turn by turn."""
    pairs = [one[name] / other[name] for one, other in zip(above.turns, below.turns, strict=True)]
    return statistics.quantiles(pairs, n=4, method="inclusive")

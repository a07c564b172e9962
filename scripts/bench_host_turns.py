"""The host's time for a launch in this checkout against another one, in turns of a few seconds.

Each checkout has a process of its own, which waits while the other one measures, so a machine whose speed changes
changes it for both. This checkout takes part twice: what it makes of itself is the spread. The device is none, see
`bench_host_time.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer.bench.environment import describe_environment

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().parent / "cpu_bench" / "host_time_worker.py"


@dataclass
class Side:
    """A process that measures one checkout, and what it has measured so far."""

    name: str
    process: subprocess.Popen[str]
    turns: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, checkout: Path, max_decode_steps: int, steps: int, most: int) -> Side:
        command = [sys.executable, str(WORKER), *map(str, (max_decode_steps, steps, most))]
        environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return cls(name, process)

    def measure(self, running: int) -> dict[str, float]:
        """Return the median milliseconds of a launch of so many requests, by part."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{running}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} has ended with {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def ratios(first: list[dict[str, float]], other: list[dict[str, float]]) -> list[float]:
    """Return quartiles of `other`'s time of the host over `first`'s, turn by turn: above 1, the first is faster."""
    pairs = [theirs["host"] / ours["host"] for ours, theirs in zip(first, other, strict=True)]
    return statistics.quantiles(pairs, n=4, method="inclusive")


def compare(checkout: Path, max_decode_steps: int, running: list[int], steps: int, turns: int) -> dict[str, Any]:
    """Measure this checkout, another one and this one again, `turns` times by turns."""
    places = {"this": ROOT, "other": checkout, "this again": ROOT}
    sides = [Side.start(name, place, max_decode_steps, steps, max(running)) for name, place in places.items()]
    try:
        found = {}
        for count in running:
            for side in sides:
                side.measure(count)  # compiles
                side.turns.clear()
            for turn in range(turns):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    side.turns.append(side.measure(count))
            this, other, again = (side.turns for side in sides)
            medians = {
                side.name: {part: statistics.median(turn[part] for turn in side.turns) for part in side.turns[0]}
                for side in sides
            }
            found[str(count)] = {
                "milliseconds": medians,
                "other_over_this": ratios(this, other),
                "this_again_over_this": ratios(this, again),
            }
        return found
    finally:
        for side in sides:
            side.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the other commit's checkout")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256], metavar="N", help="requests")
    parser.add_argument("--max-decode-steps", type=int, nargs="+", default=[1, 16], metavar="N", help="steps a launch")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="launches of a turn")
    parser.add_argument("--turns", type=int, default=12, metavar="N", help="of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    args = parser.parse_args()
    if args.turns < 2:
        parser.error("--turns must be at least 2, because quartiles are taken over them")
    table = Table(title="milliseconds of the host for a launch", title_justify="left")
    for heading in ("steps", "running", "this", "other", "other / this: median, quartiles", "this / itself"):
        table.add_column(heading, justify="right")
    result: dict[str, Any] = {"environment": describe_environment()}
    for decode_steps in args.max_decode_steps:
        found = compare(args.checkout.resolve(), decode_steps, args.running, args.steps, args.turns)
        result[f"max_decode_steps={decode_steps}"] = found
        for running, row in found.items():
            (low, median, high), (_, itself, _) = row["other_over_this"], row["this_again_over_this"]
            times = (f"{row['milliseconds'][name]['host']:.3f}" for name in ("this", "other"))
            spread = f"{median:.3f} ({low:.3f} to {high:.3f})"
            table.add_row(str(decode_steps), running, *times, spread, f"{itself:.3f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

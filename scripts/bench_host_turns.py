"""The host's time for a launch in this checkout against another one, in turns of a few seconds.

Each checkout has a process of its own, which waits while the other one measures, so a machine whose speed changes
changes it for both. This checkout takes part twice: what it makes of itself is the spread. The device is none, see
`bench_host_time.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpu_bench.turns import ROOT, Side, medians, ratios, take_turns
from jaxinfer.bench.environment import describe_environment


def compare(checkout: Path, max_decode_steps: int, running: list[int], steps: int, turns: int) -> dict[str, Any]:
    """Measure this checkout, another one and this one again, `turns` times by turns."""
    places = {"this": ROOT, "other": checkout, "this again": ROOT}
    sides = [
        Side.start(name, place, "host_time_worker.py", max_decode_steps, steps, max(running))
        for name, place in places.items()
    ]
    this, other, again = sides
    try:
        found = {}
        for count in running:
            take_turns(sides, count, turns)
            found[str(count)] = {
                "milliseconds": {side.name: medians(side) for side in sides},
                "other_over_this": ratios(other, this, "host"),
                "this_again_over_this": ratios(again, this, "host"),
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

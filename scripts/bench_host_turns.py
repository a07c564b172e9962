"""The host's time for a launch in this checkout against another one, in turns of a few seconds.

Each checkout has a process of its own, which waits while the other one measures, so a machine whose speed changes
changes it for both. This checkout takes part twice: what it makes of itself is the spread. The device is none, see
`bench_host_time.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpu_bench.turns import medians, parser_of, ratios, take_turns, three_sides
from jaxinfer.bench.environment import describe_environment


def compare(checkout: Path, max_decode_steps: int, running: list[int], steps: int, turns: int) -> dict[str, Any]:
    """Measure this checkout, another one and this one again, `turns` times by turns."""
    found = {}
    with three_sides(checkout, "host_time_worker.py", max_decode_steps, steps, max(running)) as sides:
        this, other, again = sides
        for count in running:
            take_turns(sides, count, turns)
            found[str(count)] = {
                "milliseconds": {side.name: medians(side) for side in sides},
                "other_over_this": ratios(other, this, "host"),
                "this_again_over_this": ratios(again, this, "host"),
            }
    return found


def main() -> None:
    parser = parser_of(__doc__, turns=12)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256], metavar="N", help="requests")
    parser.add_argument("--max-decode-steps", type=int, nargs="+", default=[1, 16], metavar="N", help="steps a launch")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="launches of a turn")
    args = parser.parse_args()
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

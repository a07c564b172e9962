"""Output tokens per second of this checkout against another one, by turns: many requests at once.

Each checkout has a process of its own, with everything compiled, which waits while the others measure, so a machine
whose speed changes changes it for all. This checkout takes part twice: what it makes of itself is the spread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpu_bench.turns import medians, parser_of, ratios, take_turns, three_sides
from jaxinfer.bench.environment import describe_environment

RATE = "tokens per second"


def compare(checkout: Path, model: Path | None, num_requests: int, longest: int, turns: int) -> dict[str, Any]:
    """Measure this checkout, another one and this one again, `turns` times by turns."""
    named = () if model is None else (str(model),)
    with three_sides(checkout, "throughput_worker.py", longest, *named) as sides:
        this, other, again = sides
        take_turns(sides, num_requests, turns)
        return {
            RATE: {side.name: medians(side)[RATE] for side in sides},
            "this_over_other": ratios(this, other, RATE),
            "this_again_over_this": ratios(again, this, RATE),
        }


def main() -> None:
    parser = parser_of(__doc__, turns=5)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a converted checkpoint; default: each one's own")
    parser.add_argument("--num-requests", type=int, default=48, metavar="N", help="all at once")
    parser.add_argument("--longest", type=int, default=512, metavar="N", help="tokens of the longest prompt and answer")
    args = parser.parse_args()
    model = args.model and args.model.resolve()
    found = compare(args.checkout.resolve(), model, args.num_requests, args.longest, args.turns)
    table = Table(title=f"output tokens per second, {args.num_requests} requests", title_justify="left")
    for heading in ("this", "other", "this / other: median, quartiles", "this / itself"):
        table.add_column(heading, justify="right")
    spreads = (found["this_over_other"], found["this_again_over_this"])
    table.add_row(
        *(f"{found[RATE][name]:.1f}" for name in ("this", "other")),
        *(f"{median:.3f} ({low:.3f} to {high:.3f})" for low, median, high in spreads),
    )
    Console().print(table)
    if args.json:
        args.json.write_text(
            json.dumps({"environment": describe_environment(), **found}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

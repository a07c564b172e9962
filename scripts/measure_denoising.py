"""Compare rules and thresholds of unmasking on the embedded diffusion model: tokens per forward, speed, quality.

Speeds are those of greedy answers to held-out prompts, relative to one token a round; all rules alternate.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfer.bench.environment import describe_environment
from jaxinfer.checkpoint.directory import EMBEDDED_DIFFUSION, embedded_checkpoint
from training.denoised import HEADINGS, draw, measure, table_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50, help="held-out prompts of a kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--chart", type=Path, metavar="PATH", help="draw quality over tokens a forward")
    options = parser.parse_args()
    show = partial(print, flush=True)
    measured = measure(embedded_checkpoint(), embedded_checkpoint(EMBEDDED_DIFFUSION), options.cases, show)
    title = f"up to {options.cases} held-out prompts of each kind"
    table = Table(*HEADINGS, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in table_rows(measured):
        table.add_row(*cells)
    Console(width=100).print(table)
    if options.json is not None:
        report = {"environment": describe_environment(), "rules": [each.as_dict() for each in measured]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.chart is not None:
        draw(measured, options.chart)


if __name__ == "__main__":
    main()

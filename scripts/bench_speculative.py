"""Speculation against plain decoding on the embedded checkpoints, by method and batch, by turns in one process.

Prompts are held-out ones of all kinds that the target was trained on. Every method serves the same prompts right after
plain decoding has; the speed-up is the median of these pairs. Tokens have to be the same. Accepted shares are of what
was drafted; `drafts` is how many tokens a round drafted on average, rounds without any left out; `plain steps` is the
share of steps that drafted nothing at all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpu_bench.held_out_prompts import METHODS, held_out_prompts, in_process, serve
from cpu_bench.speculation_chart import draw_chart
from jaxinfer import LLM
from jaxinfer.bench.environment import describe_environment

BATCHES = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.8)


def open_engines(method: str, adaptive: str | None) -> tuple[LLM, LLM]:
    """Plain decoding and a method, warm."""
    limits: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    speculating = LLM(**limits, speculative_config={"method": method, "adaptive": adaptive})
    for llm in (engines := (LLM(**limits), speculating)):
        print("compiling and measuring ...", flush=True)
        llm.warm_up(use_tqdm=False)
    return engines


def counted(llm: LLM) -> dict[str, float]:
    metrics = llm.get_metrics()
    return {
        "rounds": metrics.spec_decode_num_drafts,
        "drafted": metrics.spec_decode_num_draft_tokens,
        "accepted": metrics.spec_decode_num_accepted_tokens,
        "steps": metrics.num_steps_total,
        "host": metrics.host_seconds_total,
        "launches": metrics.num_launches_total,
        "tokens": metrics.generation_tokens_total,
    }


def measure(engines: tuple[LLM, LLM], method: str, batch: int, temperature: float, pairs: int) -> dict[str, Any]:
    """The median of pairs, after one that is not counted."""
    prompts = held_out_prompts(batch)
    plain, speculating = engines
    ratios: list[float] = []
    for pair in range(pairs + 1):
        reference, expected = serve(plain, prompts, batch, temperature)
        if pair == 1:
            before = counted(plain), counted(speculating)
        seconds, tokens = serve(speculating, prompts, batch, temperature)
        if pair:
            ratios.append(reference / seconds)
    of_plain, spent = (
        {key: after[key] - start[key] for key in after}
        for start, after in zip(before, (counted(plain), counted(speculating)), strict=True)
    )
    return {
        "method": method,
        "batch": batch,
        "temperature": temperature,
        "speed_up": statistics.median(ratios),
        "all_ratios": ratios,
        "accepted": spent["accepted"] / spent["drafted"] if spent["drafted"] else None,
        "drafts_per_round": spent["drafted"] / spent["rounds"] if spent["rounds"] else 0.0,
        "tokens_per_step": spent["tokens"] / spent["steps"],
        "host_ms_per_launch": [1e3 * one["host"] / one["launches"] for one in (of_plain, spent)],
        "host_us_per_token": [1e6 * one["host"] / one["tokens"] for one in (of_plain, spent)],
        "same_tokens": f"{sum(a == b for a, b in zip(tokens, expected, strict=True))}/{len(prompts)}",
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="speculation against plain decoding", title_justify="left")
    for heading in ("method", "temperature", "batch", "speed-up", "accepted", "drafts", "tokens a step", "same tokens"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
        table.add_row(
            row["method"], f"{row['temperature']:g}", f"{row['batch']}", f"{row['speed_up']:.2f}x", accepted,
            f"{row['drafts_per_round']:.1f}", f"{row['tokens_per_step']:.2f}", row["same_tokens"],
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="pairs that are counted (default: %(default)s)")
    parser.add_argument("--batch", type=int, action="append", choices=BATCHES, help="repeatable; default: all")
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable; default: all")
    parser.add_argument("--temperature", type=float, action="append", help=f"repeatable; default: {TEMPERATURES}")
    parser.add_argument("--fixed", action="store_true", help="always draft as many, in the place of the controller")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--chart", type=Path, metavar="PATH", help="draw the speed-ups here")
    options = parser.parse_args()
    methods = options.method or list(METHODS)
    if len(methods) > 1:
        rows = [row for method in methods for row in in_process(__file__, method)]
    else:
        engines = open_engines(methods[0], None if options.fixed else "cost")
        rows = []
        for temperature in options.temperature or TEMPERATURES:
            for batch in options.batch or BATCHES:
                rows.append(measure(engines, methods[0], batch, temperature, options.pairs))
                print({key: value for key, value in rows[-1].items() if key != "all_ratios"}, flush=True)
    Console(width=120).print(table_of(rows))
    if options.json is not None:
        report = {"environment": describe_environment(), "adaptive": not options.fixed, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.chart is not None:
        draw_chart(rows, options.chart)


if __name__ == "__main__":
    main()

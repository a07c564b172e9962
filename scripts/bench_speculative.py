"""Speculation against plain decoding on the embedded checkpoints, by method and batch, by turns in one process.

Prompts are held-out ones of all kinds that the target was trained on. Every method serves the same prompts right after
plain decoding has; the speed-up is the median of these pairs. Tokens have to be the same. Accepted shares are of what
was drafted; `drafts` is how many tokens a round drafted on average, rounds without any left out; `plain steps` is the
share of steps that drafted nothing at all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpu_bench.speculation_chart import draw_chart
from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.bench.environment import describe_environment
from training.corpus import stream

METHODS = ("ngram", "draft_model")
BATCHES = (1, 2, 4, 8, 16, 32)
MAX_TOKENS = 128
TEMPERATURES = (0.0, 0.8)
# A batch of few requests is over too soon to be timed: it is made of several batches one after the other.
FEWEST_REQUESTS = 8


def open_engines(methods: tuple[str, ...], adaptive: str | None) -> dict[str, LLM]:
    """Plain decoding and each method, warm, with limits that let all of them stay in one process."""
    limits: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    engines = {"plain": LLM(**limits)}
    for method in methods:
        engines[method] = LLM(**limits, speculative_config={"method": method, "adaptive": adaptive})
    for name, llm in engines.items():
        print(f"compiling and measuring {name} ...", flush=True)
        llm.warm_up(use_tqdm=False)
    return engines


def serve(llm: LLM, prompts: list[Any], batch: int, temperature: float) -> tuple[float, list[list[int]]]:
    """Seconds for all prompts, so many at a time, with nothing cached; and the tokens."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=MAX_TOKENS) for i in range(len(prompts))]
    outputs: list[RequestOutput] = []
    begin = time.perf_counter()
    for first in range(0, len(prompts), batch):
        outputs += llm.chat(prompts[first : first + batch], params[first : first + batch], use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, [output.outputs[0].token_ids for output in outputs]


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


def measure(engines: dict[str, LLM], batch: int, temperature: float, pairs: int) -> list[dict[str, Any]]:
    """A row for each method: the median of its pairs with plain decoding, after one that is not counted."""
    prompts = [sample.prompt for sample in itertools.islice(stream(1, True), 1000) if sample.messages]
    prompts = prompts[: max(batch, FEWEST_REQUESTS)]
    plain, ratios, spent = engines["plain"], {}, {}
    same: dict[str, int] = {}
    for pair in range(pairs + 1):
        for name, llm in engines.items():
            if name == "plain":
                continue
            reference, expected = serve(plain, prompts, batch, temperature)
            before = counted(llm)
            seconds, tokens = serve(llm, prompts, batch, temperature)
            after = counted(llm)
            same[name] = sum(a == b for a, b in zip(tokens, expected, strict=True))
            if pair:
                ratios.setdefault(name, []).append(reference / seconds)
                spent.setdefault(name, []).append({key: after[key] - before[key] for key in after})
    rows = []
    for name, found in ratios.items():
        total = {key: sum(one[key] for one in spent[name]) for key in spent[name][0]}
        rows.append(
            {
                "method": name,
                "batch": batch,
                "temperature": temperature,
                "speed_up": statistics.median(found),
                "all_ratios": found,
                "accepted": total["accepted"] / total["drafted"] if total["drafted"] else None,
                "drafts_per_round": total["drafted"] / total["rounds"] if total["rounds"] else 0.0,
                "tokens_per_step": total["tokens"] / total["steps"],
                "same_tokens": f"{same[name]}/{len(prompts)}",
            }
        )
    return rows


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
    parser.add_argument("--pairs", type=int, default=5, help="pairs that are counted (default: %(default)s)")
    parser.add_argument("--batch", type=int, action="append", choices=BATCHES, help="repeatable; default: all")
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable; default: all")
    parser.add_argument("--temperature", type=float, action="append", help=f"repeatable; default: {TEMPERATURES}")
    parser.add_argument("--fixed", action="store_true", help="always draft as many, in the place of the controller")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--chart", type=Path, metavar="PATH", help="draw the speed-ups here")
    options = parser.parse_args()
    engines = open_engines(tuple(options.method or METHODS), None if options.fixed else "cost")
    rows = []
    for temperature in options.temperature or TEMPERATURES:
        for batch in options.batch or BATCHES:
            rows += measure(engines, batch, temperature, options.pairs)
            for row in rows[-len(engines) + 1 :]:
                print({key: value for key, value in row.items() if key != "all_ratios"}, flush=True)
    Console(width=120).print(table_of(rows))
    if options.json is not None:
        report = {"environment": describe_environment(), "adaptive": not options.fixed, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.chart is not None:
        draw_chart(rows, options.chart)


if __name__ == "__main__":
    main()

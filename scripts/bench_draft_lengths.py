"""Compare the default (adaptive) number of drafts with the best fixed number and with plain decoding.

One pass over the lengths finds the best of them, for a method, a batch and a temperature. Then the default, that
length and plain decoding alternate on the same held-out prompts of the embedded checkpoint; ratios are medians. The
last two columns are the default's first pass, in which it learns (and compiles), and plain decoding against itself.
No engine is warmed up: the default knows what it has measured in its first 200 rounds, and in passes that compiled.
A turn in which it compiles is repeated.
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
from jaxinfer import LLM
from jaxinfer.bench.environment import describe_environment
from jaxinfer.speculative.gamma import FixedGamma
from jaxinfer.strategies.speculation import Speculation

LENGTHS = {"ngram": (1, 2, 4, 6, 8), "draft_model": (1, 2, 4, 6, 8), "eagle3": (1, 2, 4, 7, 59)}  # 59: trees
BATCHES = (1, 4, 16, 32)
TEMPERATURES = (0.0, 0.8)
NUM_NODES, DEPTH_OF_TREES = 59, 8
ROUNDS_TO_LEARN, MOST_PASSES_TO_LEARN = 200, 12


class Bench:
    """Plain decoding, the default of a method, and the same with lengths that are told."""

    def __init__(self, method: str) -> None:
        limits: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
        drafts = {} if method == "eagle3" else {"num_speculative_tokens": max(LENGTHS[method])}
        self.plain = LLM(**limits)
        self.default = LLM(**limits, speculative_config={"method": method})
        self.told = LLM(**limits, speculative_config={"method": method, "adaptive": None, **drafts})

    def tell(self, length: int) -> LLM:
        strategy = self.told.core.strategy
        assert isinstance(strategy, Speculation)
        is_tree = length == NUM_NODES
        strategy.controller = FixedGamma(DEPTH_OF_TREES if is_tree else length, NUM_NODES if is_tree else 0)
        return self.told

    def learn(self, prompts: list[Any], batch: int, temperature: float) -> float:
        """Serve until the default has had its first rounds and compiles no more; the first pass, in seconds."""
        first, rounds = 0.0, self.default.get_metrics().num_steps_total
        for _ in range(MOST_PASSES_TO_LEARN):
            before = self.default.get_metrics()
            seconds, _ = serve(self.default, prompts, batch, temperature)
            first = first or seconds
            after = self.default.get_metrics()
            is_done = after.num_steps_total >= rounds + ROUNDS_TO_LEARN
            if is_done and after.num_compiles_total == before.num_compiles_total:
                break
        return first


def measure(bench: Bench, method: str, batch: int, temperature: float, turns: int) -> dict[str, Any]:
    prompts = held_out_prompts(batch)
    of_lengths: dict[int, float] = {}
    _, expected = serve(bench.plain, prompts, batch, temperature)
    for length in LENGTHS[method]:
        told = bench.tell(length)
        serve(told, prompts, batch, temperature)
        of_lengths[length], tokens = serve(told, prompts, batch, temperature)
        assert tokens == expected, f"{length} drafts change a token"
    best = min(of_lengths, key=lambda length: of_lengths[length])
    first = bench.learn(prompts, batch, temperature)
    seconds: dict[str, list[float]] = {"plain": [], "default": [], "best": [], "plain again": []}
    told = bench.tell(best)
    ways = (("plain", bench.plain), ("default", bench.default), ("best", told), ("plain again", bench.plain))
    repeated = 0
    while len(seconds["default"]) < turns:
        compiles = bench.default.get_metrics().num_compiles_total
        turn: dict[str, float] = {}
        for name, llm in ways:
            turn[name], tokens = serve(llm, prompts, batch, temperature)
            assert tokens == expected, f"{name} changes a token"
        if bench.default.get_metrics().num_compiles_total > compiles and repeated < MOST_PASSES_TO_LEARN:
            repeated += 1  # it still learns
            continue
        for name, spent in turn.items():
            seconds[name].append(spent)

    def ratio(of: str, to: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[of], seconds[to], strict=True))

    return {
        "method": method, "temperature": temperature, "batch": batch, "best": best,
        "seconds_of_lengths": of_lengths,
        "best_to_plain": ratio("best", "plain"), "default_to_plain": ratio("default", "plain"),
        "default_to_best": ratio("default", "best"), "first_to_plain": statistics.median(seconds["plain"]) / first,
        "plain_to_itself": ratio("plain again", "plain"), "repeated_turns": repeated,
    }  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="the default number of drafts", title_justify="left")
    headings = ("method", "temperature", "batch", "best", "best / plain", "default / plain", "default / best")
    for heading in (*headings, "at first / plain", "plain / plain"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        names = ("best_to_plain", "default_to_plain", "default_to_best", "first_to_plain", "plain_to_itself")
        best = "trees" if row["best"] == NUM_NODES else str(row["best"])
        table.add_row(
            row["method"], f"{row['temperature']:g}", str(row["batch"]), best, *(f"{row[name]:.2f}x" for name in names)
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable; default: all")
    parser.add_argument("--batch", type=int, action="append", choices=BATCHES, help="repeatable; default: all")
    parser.add_argument("--temperature", type=float, action="append", help=f"repeatable; default: {TEMPERATURES}")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    arguments = parser.parse_args()
    methods = arguments.method or METHODS
    rows: list[dict[str, Any]] = []
    if len(methods) > 1:
        for method in methods:
            rows += in_process(__file__, method)
    else:
        bench = Bench(methods[0])
        for temperature in arguments.temperature or TEMPERATURES:
            for batch in arguments.batch or BATCHES:
                rows.append(measure(bench, methods[0], batch, temperature, arguments.turns))
                Console(width=120).print(table_of(rows[-1:]))
    Console(width=120).print(table_of(rows))
    if arguments.json is not None:
        found = {"environment": describe_environment(), "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

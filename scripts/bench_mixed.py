"""What one request that needs something besides costs the seven beside it, and itself.

Eight requests of the embedded checkpoint run together, on this machine or on a simulated device with longer steps.
`others` is the seven's tokens a second beside the one, against the same seven beside a plain one; `one` is the one's
tokens a second against its own in launches of one round. Turns change about; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpu_bench.slow_device import slow_down
from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.environment import describe_environment

METHODS = ("plain", "ngram", "draft_model", "eagle3")
NEEDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {300: 2.0}},
    "repetition penalty": {"repetition_penalty": 1.1},
    "log probabilities": {"logprobs": 2},
    "bad words": {"bad_words": ["because of the weather"]},
    "stop string": {"stop": ["a text that never comes"]},
}
NUM_REQUESTS, MAX_TOKENS = 8, 160
TEXTS = (
    "the sea at night",
    "numbers",
    "a letter to a friend",
    "how bread is made",
    "rain",
    "a list",
    "colours",
    "birds",
)


def open_engine(method: str, seconds: float, **options: Any) -> LLM:
    if method != "plain":
        options["speculative_config"] = {"method": method}
    llm = LLM(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=512, **options)
    llm.warm_up(use_tqdm=False)
    if seconds:
        slow_down(llm.core, seconds)
    return llm


def serve(llm: LLM, needs: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of the seven, each for itself, and of the one, from their first token on."""
    llm.reset_prefix_cache()
    plain = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    params = [SamplingParams(**plain, **(needs if i == NUM_REQUESTS - 1 else {})) for i in range(NUM_REQUESTS)]
    before = llm.get_metrics()
    outputs = llm.generate([f"Tell me about {text}." for text in TEXTS], params, use_tqdm=False)
    after = llm.get_metrics()
    rates = []
    for output in outputs:
        times = output.metrics
        assert times is not None and times.first_token_time is not None and times.finished_time is not None
        rates.append((MAX_TOKENS - 1) / (times.finished_time - times.first_token_time))
    return {
        "others": statistics.fmean(rates[:-1]),
        "one": rates[-1],
        "launches": after.num_launches_total - before.num_launches_total,
        "rounds": after.num_steps_total - before.num_steps_total,
        "drafted": after.spec_decode_num_drafts - before.spec_decode_num_drafts,
    }


def measure(method: str, seconds: float, turns: int) -> list[dict[str, Any]]:
    many, single = open_engine(method, seconds), open_engine(method, seconds, max_decode_steps=1)
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in NEEDS}
    for turn in range(turns + 1):  # the first one is not counted
        for name, needs in NEEDS.items():
            rates = {"without": serve(many, {}), "with": serve(many, needs), "single": serve(single, needs)}
            if turn:
                found[name].append(rates)
    rows = []
    for name, of_turns in found.items():
        others = [rates["with"]["others"] / rates["without"]["others"] for rates in of_turns]
        one = [rates["with"]["one"] / rates["single"]["one"] for rates in of_turns]
        last = of_turns[-1]
        rows.append(
            {
                "method": method, "seconds": seconds, "needs": name,
                "others": statistics.median(others), "others_spread": [min(others), max(others)],
                "one": statistics.median(one), "one_spread": [min(one), max(one)],
                **{key: (last["without"][key], last["with"][key]) for key in ("launches", "rounds", "drafted")},
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--step-ms", nargs="+", type=float, default=[0.0, 12.0], help="0: this machine")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "bench_mixed.json")
    args = parser.parse_args()
    rows = [
        row
        for method in args.methods
        for step in args.step_ms
        for row in measure(method, step / 1e3, args.turns)
    ]  # fmt: skip
    args.output.write_text(json.dumps({"environment": describe_environment(), "rows": rows}, indent=2) + "\n")
    table = Table("method", "step", "the one's", "others", "one", "launches", "rounds", "drafted rounds")
    for row in rows:
        step = f"{1e3 * row['seconds']:g} ms" if row["seconds"] else "this machine"
        spreads = [
            f"{row[key]:.2f} ({row[f'{key}_spread'][0]:.2f} to {row[f'{key}_spread'][1]:.2f})"
            for key in ("others", "one")
        ]
        counts = [f"{row[key][0]:.0f} → {row[key][1]:.0f}" for key in ("launches", "rounds", "drafted")]
        table.add_row(row["method"], step, row["needs"], *spreads, *counts)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

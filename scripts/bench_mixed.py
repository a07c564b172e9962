"""Cost of one request with an extra need (a bias, penalty, stop string ...) for the seven beside it, and for itself.

Eight requests of the embedded checkpoint run together, on this machine or on a simulated device with longer steps.
`others` is the seven's tokens a second beside the one, against the same seven beside a plain one; `one` is the one's
tokens a second against its own in launches of one round. Variants alternate; figures are medians. With `--arriving N`,
N prompts of 500 tokens that want a single token arrive every second. `--arriving` alone adds the next one as soon as
one is answered, so that variants with shorter launches answer more prompts and have less time for the eight.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from cpu_bench.slow_device import slow_down
from jaxinfer import LLM, RequestOutput, SamplingParams, build
from jaxinfer.bench.environment import describe_environment
from jaxinfer.config import EngineConfig

METHODS = ("plain", "ngram", "draft_model", "eagle3")
NEEDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {300: 2.0}},
    "repetition penalty": {"repetition_penalty": 1.1},
    "log probabilities": {"logprobs": 2},
    "bad words": {"bad_words": ["because of the weather"]},
    "stop string": {"stop": ["a text that never comes"]},
}
NUM_REQUESTS, MAX_TOKENS = 8, 160
ARRIVING_TOKENS = 500
COUNTED = ("launches", "rounds", "drafted", "prompts")
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


@dataclass(frozen=True)
class OneRound(EngineConfig):
    """An engine whose launches have one round."""

    max_decode_steps: int = 1


def open_engine(method: str, seconds: float, config: type[EngineConfig] = EngineConfig) -> LLM:
    options: dict[str, Any] = {} if method == "plain" else {"speculative_config": {"method": method}}
    with mock.patch.object(build, "EngineConfig", config):
        llm = LLM(max_num_seqs=NUM_REQUESTS + 1, max_num_batched_tokens=1024, **options)
    if config is EngineConfig:
        llm.warm_up(use_tqdm=False)  # the other one compiles in turns that are not counted
    if seconds:
        slow_down(llm.core, seconds)
    return llm


def serve(llm: LLM, needs: dict[str, Any], *, arriving: float) -> dict[str, float]:
    """Tokens a second of the seven, each for itself, and of the one, from their first token on."""
    llm.reset_prefix_cache()
    plain = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    params = [SamplingParams(**plain, **(needs if i == NUM_REQUESTS - 1 else {})) for i in range(NUM_REQUESTS)]
    before = llm.get_metrics()
    outputs, prompts = run(llm, [f"Tell me about {text}." for text in TEXTS], params, arriving=arriving)
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
        "compiles": after.num_compiles_total - before.num_compiles_total,
        "prompts": prompts,
    }


def run(
    llm: LLM, texts: Sequence[str], params: Sequence[SamplingParams], *, arriving: float
) -> tuple[list[RequestOutput], float]:
    """The outputs in order, and how many other prompts a second were answered meanwhile."""
    begin, answered, rng = time.perf_counter(), 0, random.Random(0)
    names = [llm.add_request(text, one) for text, one in zip(texts, params, strict=True)]
    found: dict[str, RequestOutput] = {}
    others: set[str] = set()
    added = 0
    while len(found) < len(names):
        due = not others if math.isinf(arriving) else (time.perf_counter() - begin) * arriving >= added + 1
        if arriving and due:
            ids = [rng.randrange(300, 2000) for _ in range(ARRIVING_TOKENS)]
            others.add(llm.add_request({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=1)))
            added += 1
        for output in llm.step():
            if output.request_id in others:
                others.remove(output.request_id)
                answered += 1
            elif output.request_id in names:  # not one that a run before has left
                found[output.request_id] = output
    seconds = time.perf_counter() - begin
    for other in others:
        llm.abort(other)
    while llm.has_unfinished_requests():
        llm.step()
    return [found[name] for name in names], answered / seconds


def measure(method: str, seconds: float, turns: int, *, arriving: float) -> list[dict[str, Any]]:
    many, single = open_engine(method, seconds), open_engine(method, seconds, OneRound)
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in NEEDS}
    for turn in range(turns + 1):  # the first one is not counted
        for name, needs in NEEDS.items():
            rates = {
                "without": serve(many, {}, arriving=arriving),
                "with": serve(many, needs, arriving=arriving),
                "single": serve(single, needs, arriving=arriving),
            }
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
                **{key: (last["without"][key], last["with"][key]) for key in COUNTED},
                "compiles": sum(rates[side]["compiles"] for rates in of_turns for side in rates),
            }
        )  # fmt: skip
    return rows


def in_process(method: str, step: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one method and one step, from a process of its own: engines that are warm have many memory maps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--methods", method, "--step-ms", str(step), "--turns", str(args.turns)]
        command += ["--output", str(file), "--arriving", str(args.arriving)]
        subprocess.run(command, check=True)
        return json.loads(file.read_text(encoding="utf-8"))["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--step-ms", nargs="+", type=float, default=[0.0, 12.0], help="0: this machine")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--arriving", type=float, nargs="?", default=0.0, const=math.inf, metavar="N",
        help="prompts of 500 tokens that arrive every second; alone: the next one as soon as one is answered",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "bench_mixed.json")
    args = parser.parse_args()
    if len(args.methods) * len(args.step_ms) == 1:
        rows = measure(args.methods[0], args.step_ms[0] / 1e3, args.turns, arriving=args.arriving)
    else:
        rows = [row for method in args.methods for step in args.step_ms for row in in_process(method, step, args)]
    args.output.write_text(json.dumps({"environment": describe_environment(), "rows": rows}, indent=2) + "\n")
    table = Table(
        "method", "step", "the one's", "others", "one", "launches", "rounds", "drafted rounds", "prompts a second",
        "compiles",
    )  # fmt: skip
    for row in rows:
        step = f"{1e3 * row['seconds']:g} ms" if row["seconds"] else "this machine"
        spreads = [
            f"{row[key]:.2f} ({row[f'{key}_spread'][0]:.2f} to {row[f'{key}_spread'][1]:.2f})"
            for key in ("others", "one")
        ]
        counts = [f"{row[key][0]:.0f} → {row[key][1]:.0f}" for key in ("launches", "rounds", "drafted")]
        counts += [f"{row['prompts'][1]:.1f}", f"{row['compiles']}"]
        table.add_row(row["method"], step, row["needs"], *spreads, *counts)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

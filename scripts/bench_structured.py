"""Structured output against unconstrained decoding of the embedded checkpoint, by turns in one engine.

`free`: a grammar that the answers keep to by themselves, so nothing is refused; `with` against `without`, in tokens a
second. `refused`: a JSON schema that no prompt asked for, with masks as the engine chooses, against the better of masks
always and never. `masked`: masks on every draw, none of which refuses anything, against launches of one step without
that are read before the next, as a mask needs the token before it; in the JSON, `ahead` is the rate without waiting.
`fixed`: a text of about 600 tokens that the grammar gives but for a few fields, against as many tokens without. `slow`:
streams beside grammars that take seconds to compile: the longest gap between tokens against that beside a busy thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from cpu_bench.held_out_prompts import held_out_prompts
from cpu_bench.slow_device import slow_down
from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.bench.environment import describe_environment
from jaxinfer.scheduling import refusals as refusals_module

METHODS = ("plain", "ngram", "draft_model", "eagle3")
ANYTHING = {"regex": "(.|\n)*"}
PERSON = {
    "json": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"type": "array", "items": {"enum": ["tea", "rain", "books", "long walks"]}, "maxItems": 3},
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    },
    "disable_any_whitespace": True,
}
MOST_TOKENS, NUM_FIXED, NUM_SLOW = 96, 12, 15
COUNTED = ("tokens", "steps", "accepted", "refusals", "dropped", "forced")


def fixed_text() -> dict[str, Any]:
    """A form of many fixed sentences, with a number after each."""
    sentence = (
        "The lamp in the harbour is lit at dusk, and the boats that are still out at sea turn home by it. Number: "
    )
    parts = [f'"{number + 1}. {sentence}" /[0-9]/ "\\n"' for number in range(NUM_FIXED)]
    return {"grammar": "start: " + " ".join(parts) + "\n"}


def run(llm: LLM, batch: int, structured: dict[str, Any] | None, **params: Any) -> dict[str, float]:
    """Tokens a second with so many requests at a time, and what constraints cost."""
    llm.reset_prefix_cache()
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": MOST_TOKENS, **params}, structured_outputs=structured)
    prompts, outputs = held_out_prompts(batch), []
    before, begin = llm.get_metrics(), time.perf_counter()
    for first in range(0, len(prompts), batch):
        outputs += llm.chat(prompts[first : first + batch], given, use_tqdm=False)
    seconds, after = time.perf_counter() - begin, llm.get_metrics()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    errors = [output.error for output in outputs if output.error]
    assert not errors, errors
    return {
        "rate": tokens / seconds,
        "tokens": tokens,
        "steps": after.num_steps_total - before.num_steps_total,
        "accepted": after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens,
        "refusals": after.constraint_refusals_total - before.constraint_refusals_total,
        "dropped": after.constraint_dropped_tokens_total - before.constraint_dropped_tokens_total,
        "forced": after.constraint_forced_tokens_total - before.constraint_forced_tokens_total,
    }


def turns(count: int, ways: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """What each way gives in turns, the first of which is not counted."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(count + 1):
        for name, way in ways.items():
            result = way()
            if turn:
                found[name].append(result)
    return found


def ratios(found: dict[str, list[dict[str, float]]], name: str, other: str) -> list[float]:
    return [one["rate"] / two["rate"] for one, two in zip(found[name], found[other], strict=True)]


def open_llm(method: str, batch: int, seconds: float, *, fixed: bool) -> LLM:
    drafting = {"method": method, "adaptive": None if fixed else "cost"}
    options: dict[str, Any] = {} if method == "plain" else {"speculative_config": drafting}
    llm = LLM(max_num_seqs=max(batch, 8), max_num_batched_tokens=512, **options)
    llm.warm_up(use_tqdm=False)
    if seconds:
        slow_down(llm.core, seconds)
    return llm


def measure_free(llm: LLM, batch: int, count: int) -> dict[str, Any]:
    options: dict[str, Any] = {"ignore_eos": False}
    found = turns(
        count,
        {"without": lambda: run(llm, batch, None, **options), "with": lambda: run(llm, batch, ANYTHING, **options)},
    )
    return row("free", found, ratios(found, "with", "without"), "with")


def measure_refused(llm: LLM, batch: int, count: int) -> dict[str, Any]:
    def masked(share: float) -> dict[str, float]:
        with mock.patch.multiple(refusals_module, FREQUENT=share, SELDOM=share):
            return run(llm, batch, PERSON)

    ways = {"chosen": lambda: run(llm, batch, PERSON), "always": lambda: masked(-1.0), "never": lambda: masked(2.0)}
    found = turns(count, ways)
    best = [
        one["rate"] / max(two["rate"], three["rate"])
        for one, two, three in zip(found["chosen"], found["always"], found["never"], strict=True)
    ]
    return row("refused", found, best, "chosen")


def measure_masked(llm: LLM, batch: int, count: int) -> dict[str, Any]:
    def with_masks() -> dict[str, float]:
        with mock.patch.multiple(refusals_module, FREQUENT=-1.0, SELDOM=-1.0):
            return run(llm, batch, ANYTHING, logprobs=0)

    def without() -> dict[str, float]:
        with mock.patch.object(llm.core, "config", replace(llm.core.config, overlap=False)):
            return run(llm, batch, None, logprobs=0)

    found = turns(count, {"without": without, "with": with_masks, "ahead": lambda: run(llm, batch, None, logprobs=0)})
    return row("masked", found, ratios(found, "with", "without"), "with")


def measure_fixed(llm: LLM, batch: int, count: int) -> dict[str, Any]:
    form = fixed_text()
    length = int(run(llm, batch, form, max_tokens=900)["tokens"]) // len(held_out_prompts(batch))
    found = turns(
        count,
        {
            "without": lambda: run(llm, batch, None, max_tokens=length, ignore_eos=True),
            "with": lambda: run(llm, batch, form, max_tokens=900),
        },
    )
    return row("fixed", found, ratios(found, "with", "without"), "with")


def row(kind: str, found: dict[str, list[dict[str, float]]], values: list[float], name: str) -> dict[str, Any]:
    last = found[name][-1]
    return {
        "kind": kind, "ratio": statistics.median(values), "spread": [min(values), max(values)],
        "rates": {way: statistics.median([turn["rate"] for turn in results]) for way, results in found.items()},
        **{key: last[key] for key in COUNTED},
    }  # fmt: skip


async def gaps(llm: AsyncLLM, beside: Any) -> list[float]:
    """Seconds between the outputs of 16 streams while `beside` runs."""
    found: list[float] = []

    async def stream(prompt: Any, seed: int) -> None:
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=200, ignore_eos=True)
        last = None
        async for _ in llm.chat(prompt, params):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now

    prompts = held_out_prompts(16)
    tasks = [asyncio.create_task(stream(prompt, seed)) for seed, prompt in enumerate(prompts)]
    await asyncio.sleep(0.3)
    await beside()
    await asyncio.gather(*tasks)
    return found


def slow_schema(seed: int) -> dict[str, Any]:
    """A schema that takes a fifth of a second to compile, about the most that the limit of its size allows."""
    date = {"type": "string", "format": "date-time"}
    return {"json": {"type": "object", "properties": {f"p{seed}_{number}": date for number in range(600)}}}


async def measure_slow(count: int) -> dict[str, Any]:
    llm = AsyncLLM(max_num_seqs=20, max_num_batched_tokens=512)
    await llm.warm_up(use_tqdm=False)
    seconds: list[float] = []

    async def compile_beside() -> None:
        begin = time.perf_counter()
        for number in range(NUM_SLOW):
            params = SamplingParams(max_tokens=1, structured_outputs=slow_schema(NUM_SLOW * len(seconds) + number))
            async for _ in llm.generate({"prompt_token_ids": [1, 2, 3]}, params):
                pass
        seconds.append(time.perf_counter() - begin)

    async def busy() -> None:
        end = time.perf_counter() + (seconds[-1] if seconds else 1.0)

        def spin() -> None:
            while time.perf_counter() < end:
                sum(range(1000))

        thread = threading.Thread(target=spin)
        thread.start()
        await asyncio.to_thread(thread.join)

    pairs = []
    for turn in range(count + 1):
        with_grammar, with_thread = await gaps(llm, compile_beside), await gaps(llm, busy)
        if turn:
            pairs.append((max(with_grammar), max(with_thread), statistics.median(with_thread)))
    await llm.shutdown()
    values = [grammar / thread for grammar, thread, _ in pairs]
    return {
        "kind": "slow", "ratio": statistics.median(values), "spread": [min(values), max(values)],
        "compile_seconds": statistics.median(seconds), "longest_ms": 1e3 * pairs[-1][0],
        "longest_beside_a_thread_ms": 1e3 * pairs[-1][1],
    }  # fmt: skip


MEASURES = {"free": measure_free, "refused": measure_refused, "masked": measure_masked, "fixed": measure_fixed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["plain"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--step-ms", type=float, default=0.0, help="a simulated device; 0: this machine")
    parser.add_argument("--fixed", action="store_true", help="drafts in every round, whether they pay or not")
    parser.add_argument("--kinds", nargs="+", choices=[*MEASURES, "slow"], default=[*MEASURES, "slow"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "bench_structured.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for method in args.methods:
        for batch in args.batches:
            kinds = [kind for kind in args.kinds if kind in MEASURES]
            llm = open_llm(method, batch, args.step_ms / 1e3, fixed=args.fixed) if kinds else None
            for kind in kinds:
                assert llm is not None
                rows.append({"method": method, "batch": batch, **MEASURES[kind](llm, batch, args.turns)})
                print(json.dumps(rows[-1]), flush=True)
    if "slow" in args.kinds:
        rows.append({"method": "plain", "batch": 16, **asyncio.run(measure_slow(args.turns))})
        print(json.dumps(rows[-1]), flush=True)
    args.output.write_text(json.dumps({"environment": describe_environment(), "rows": rows}, indent=2) + "\n")
    table = Table("method", "batch", "kind", "ratio", "spread", *COUNTED)
    for found in rows:
        counts = [f"{found[key]:.0f}" if key in found else "" for key in COUNTED]
        spread = f"{found['spread'][0]:.2f} to {found['spread'][1]:.2f}"
        table.add_row(found["method"], str(found["batch"]), found["kind"], f"{found['ratio']:.2f}", spread, *counts)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

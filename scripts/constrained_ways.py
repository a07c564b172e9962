"""Constrained answers in every way of decoding, against each of them alone in plain decoding: the table way x drafter x
kind of constraint, with tokens that differ (none should), refusals, forced tokens, steps and time.

`alone`: one after the other. `together`: all kinds at once, beside as many unconstrained requests. `chunked`: prompts
in chunks of 16 tokens. `cached`: again, with prompts that the prefix cache has. `preempted`: with room for few of them
at a time. `masked`: with masks on every draw. Needs the embedded checkpoints alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.scheduling import refusals

METHODS = ("plain", "ngram", "draft_model", "eagle3", "diffusion")
WAYS = ("alone", "together", "chunked", "cached", "preempted", "masked")
QUESTION = "Who keeps the lighthouse? Answer with a JSON object."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "years": {"type": "integer", "minimum": 0, "maximum": 99},
        "lamps": {"type": "array", "items": {"enum": ["oil", "gas", "electric light"]}, "maxItems": 2},
    },
    "required": ["name", "years", "lamps"],
}
LARK = """
start: "The keeper of the lighthouse is called " WORD ", and has kept it for " /[0-9]{1,2}/ " years."
WORD: /[A-Z][a-z]{2,8}/
"""
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "schema, drawn": {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0, "seed": 1, "top_p": 0.95},
    "JSON object": {"structured_outputs": {"json_object": True}, "temperature": 0.7, "seed": 2},
    "regex": {"structured_outputs": {"regex": r"(It is|I am) [a-z ]{4,30}\."}, "temperature": 0.8, "seed": 3},
    "choice": {"structured_outputs": {"choice": ["the keeper", "the keeper's daughter", "a ship at sea"]}},
    "grammar": {"structured_outputs": {"grammar": LARK}, "temperature": 0.9, "seed": 4},
    "bad words": {"bad_words": ["the lighthouse", "keeps the", "the lamp"], "temperature": 0.5, "seed": 5},
    "log probabilities": {"structured_outputs": {"json": SCHEMA}, "logprobs": 1, "temperature": 0.6, "seed": 6},
}
UNCONSTRAINED: dict[str, Any] = {"temperature": 0.8}


def kinds_of(method: str) -> list[str]:
    return [kind for kind in KINDS if method != "diffusion" or not {"logprobs", "bad_words"} & KINDS[kind].keys()]


def open_llm(method: str, way: str) -> LLM:
    options: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 160}
    if way == "chunked":
        options["max_num_batched_tokens"] = 16
    if way == "preempted":
        options["kv_cache_tokens"] = 176
    if method in ("ngram", "draft_model", "eagle3"):
        options["speculative_config"] = {"method": method}
    return LLM("tiny-diffusion" if method == "diffusion" else "tiny", **options)


def run(llm: LLM, way: str, method: str) -> tuple[dict[str, RequestOutput], dict[str, dict[str, float]]]:
    """The outputs of all kinds, and what each has cost, or in one batch all of them."""
    kinds = kinds_of(method)
    batches = [[kind] for kind in kinds] if way in ("alone", "masked") else [kinds]
    found: dict[str, RequestOutput] = {}
    costs: dict[str, dict[str, float]] = {}
    for batch in batches:
        others = len(batch) if len(batch) > 1 else 0
        params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **KINDS[kind]}) for kind in batch]
        params += [SamplingParams(**UNCONSTRAINED, seed=seed, max_tokens=64) for seed in range(others)]
        before, begin = llm.get_metrics(), time.perf_counter()
        outputs = llm.chat([[{"role": "user", "content": QUESTION}]] * len(params), params, use_tqdm=False)
        seconds, after = time.perf_counter() - begin, llm.get_metrics()
        found |= dict(zip(batch, outputs, strict=False))
        costs[batch[0] if len(batch) == 1 else "all"] = {
            "refusals": after.constraint_refusals_total - before.constraint_refusals_total,
            "forced": after.constraint_forced_tokens_total - before.constraint_forced_tokens_total,
            "steps": after.num_steps_total - before.num_steps_total,
            "preemptions": after.num_preemptions_total - before.num_preemptions_total,
            "seconds": seconds,
        }
    return found, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    table = Table("drafter", "way", "kind", "tokens", "differ", "refusals", "forced", "steps", "preempted", "seconds")
    expected: dict[str, dict[str, RequestOutput]] = {}
    num_differing = 0
    for method in args.methods:
        model = "diffusion" if method == "diffusion" else "autoregressive"
        opened: dict[str, LLM] = {}
        for way in ("alone", *(way for way in args.ways if way != "alone")):
            place = way if way in ("chunked", "preempted") else "roomy"
            if place not in opened:
                opened.clear()
                opened[place] = open_llm(method, way)
            llm = opened[place]
            bounds = dict.fromkeys(("FREQUENT", "SELDOM"), -1.0) if way == "masked" else {}
            with mock.patch.multiple(refusals, **bounds) if bounds else nullcontext():
                run(llm, way, method)  # compiles what is needed, and fills the prefix cache
                if way != "cached":
                    llm.reset_prefix_cache()
                found, costs = run(llm, way, method)
            expected.setdefault(model, found)
            for kind, cost in costs.items():
                of_cost = list(found) if kind == "all" else [kind]
                tokens = [len(found[one].outputs[0].token_ids) for one in of_cost]
                differ = [
                    one
                    for one in of_cost
                    if found[one].outputs[0].token_ids != expected[model][one].outputs[0].token_ids or found[one].error
                ]
                num_differing += len(differ)
                counts = [f"{cost[name]:.0f}" for name in ("refusals", "forced", "steps", "preemptions")]
                row = [method, way, kind, f"{sum(tokens)}", ", ".join(differ) or "0", *counts, f"{cost['seconds']:.2f}"]
                print("; ".join(row), file=sys.stderr, flush=True)
                table.add_row(*row)
    Console(width=130).print(table)
    sys.exit(num_differing > 0)


if __name__ == "__main__":
    main()

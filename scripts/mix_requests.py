"""Random requests of every kind on one warm engine, for minutes or hours: what was compiled, and what failed.

Penalties, biases, bans, lists of log probabilities, several samples, stop strings, grammars, streams that clients
leave, branches, skeletons, beam searches and resets of the prefix cache run beside each other. It ends with status 1
unless XLA compiled nothing after warm-up, no step failed, no request ended with an error, and nothing is left in the
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from cpu_bench.held_out_prompts import held_out_prompts
from jaxinfer import AsyncLLM, BeamSearchParams, SamplingParams
from jaxinfer.bench.environment import describe_environment

NUM_PROMPTS = 200
NUM_WORDS = 2048  # of the embedded model
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}},
    {"regex": "[A-Z][a-z]{2,8}( [a-z]{2,8}){3,8}\\."},
    {"choice": ["yes", "no", "perhaps"]},
]  # fmt: skip
# Entries of the result that are zero or empty if all is well.
FAULTS = (
    "errors", "compiles_after_warm_up", "compiles_of_process_after_warm_up", "recoveries", "left", "fault_of_pages",
)  # fmt: skip
SUFFIXES = [" The keeper", " A boat", " The sea", " One morning"]


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mixture of what one request can ask for."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.2 else otherwise

    def tokens(count: int) -> list[int]:
        return rng.integers(0, NUM_WORDS, count).tolist()

    most = int(rng.integers(1, 97))
    grammar = sometimes(GRAMMARS[int(rng.integers(len(GRAMMARS)))], None)
    samples = 1 if grammar else sometimes(int(rng.integers(2, 5)), 1)
    return SamplingParams(
        n=samples, max_tokens=most,
        temperature=sometimes(0.0, float(rng.uniform(0.2, 1.5))) if samples == 1 else 1.0,
        top_p=sometimes(float(rng.uniform(0.1, 1)), 1.0), top_k=sometimes(int(rng.integers(1, 200)), 0),
        min_p=sometimes(float(rng.uniform(0, 0.3)), 0.0), seed=sometimes(int(rng.integers(1000)), None),
        presence_penalty=sometimes(1.0, 0.0), frequency_penalty=sometimes(0.5, 0.0),
        repetition_penalty=sometimes(1.2, 1.0), logit_bias=sometimes(dict.fromkeys(tokens(8), 2.0), None),
        allowed_token_ids=None if grammar else sometimes(tokens(300), None),
        bad_words=None if grammar else sometimes(["the", " of the sea"], None),
        stop=sometimes([".", "\n"], None), stop_token_ids=sometimes(tokens(3), None),
        ignore_eos=grammar is None and sometimes(True, False),
        min_tokens=0 if grammar else sometimes(int(rng.integers(0, most + 1)), 0),
        logprobs=sometimes(int(rng.integers(0, 21)), None), prompt_logprobs=sometimes(int(rng.integers(0, 6)), None),
        structured_outputs=grammar,
    )  # fmt: skip


async def one(llm: AsyncLLM, rng: np.random.Generator, prompts: list[Any], tally: collections.Counter[str]) -> None:
    """Serve one request of a random kind."""
    kind = rng.choice(["request", "stream", "leave", "branches", "skeleton", "beams", "reset"],
                      p=[0.55, 0.14, 0.05, 0.1, 0.06, 0.06, 0.04])  # fmt: skip
    prompt = prompts[int(rng.integers(len(prompts)))]
    params = random_params(rng)
    question = prompt[-1]["content"]
    temperature, seed = float(rng.choice([0.0, 0.9])), int(rng.integers(1000))
    if kind in ("request", "stream"):
        async for output in llm.chat(prompt, params, output_kind="final" if kind == "request" else "delta"):
            tally["tokens"] += sum(len(each.token_ids) for each in output.outputs)
    elif kind == "leave":
        endless = SamplingParams(max_tokens=90, ignore_eos=True)
        async with contextlib.aclosing(await llm.add(prompt, endless)) as stream:
            await anext(stream)
    elif kind == "branches":
        each = SamplingParams(temperature=temperature, seed=seed, max_tokens=int(rng.integers(1, 49)))
        mode = str(rng.choice(["in_one_sequence", "batching"]))
        count = int(rng.integers(2, len(SUFFIXES) + 1))
        async for output in llm.generate_branches(question, SUFFIXES[:count], each, mode, output_kind="final"):
            tally["tokens"] += sum(len(each.token_ids) for each in output.outputs)
    elif kind == "skeleton":
        await llm.skeleton_of_thought(question, SamplingParams(temperature=temperature, seed=seed, max_tokens=128))
    elif kind == "beams":
        width, most = int(rng.integers(2, 5)), int(rng.integers(4, 25))
        grammar = GRAMMARS[1] if rng.random() < 0.2 else None
        await llm.beam_search(question, BeamSearchParams(width, most, structured_outputs=grammar))
    else:
        await llm.reset_prefix_cache()
    tally[str(kind)] += 1


async def mix(llm: AsyncLLM, seconds: float, clients: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """Let so many clients send requests for so long; returns what was done, and the errors."""
    prompts = held_out_prompts(NUM_PROMPTS)
    tally: collections.Counter[str] = collections.Counter()
    errors: list[str] = []
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = np.random.default_rng((seed, number))
        while time.monotonic() < end:
            try:
                await one(llm, rng, prompts, tally)
            except Exception as error:
                logging.exception("a request failed")
                errors.append(f"{type(error).__name__}: {error}")

    async def watch() -> None:
        with tqdm(total=round(seconds), desc="Mixing", unit="s", mininterval=5.0) as bar:
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(5.0, left))
                bar.update(round(seconds - max(0.0, end - time.monotonic())) - bar.n)
                bar.set_postfix(requests=sum(tally.values()) - tally["tokens"], errors=len(errors))

    await asyncio.gather(watch(), *map(client, range(clients)))
    return tally, errors


async def run(args: argparse.Namespace) -> dict[str, Any]:
    compiles: list[float] = []  # seconds of each in the process, inside launches or not

    def heard(event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    speculative = None if args.method == "plain" else {"method": args.method}
    async with AsyncLLM(speculative_config=speculative) as llm:
        begin = time.perf_counter()
        await llm.warm_up()
        warm_up = time.perf_counter() - begin
        programs, in_warm_up = llm.get_metrics().num_compiles_total, len(compiles)
        tally, errors = await mix(llm, args.seconds, args.clients, args.seed)
        metrics = llm.get_metrics()
        inspection = await llm.inspect()
        return {
            "method": args.method, "seconds": args.seconds, "clients": args.clients, "seed": args.seed,
            "warm_up_seconds": round(warm_up, 1), "programs": programs,
            "done": dict(tally), "errors": errors,
            "compiles_after_warm_up": metrics.num_compiles_after_warm_up_total,
            "compiles_of_process_after_warm_up": len(compiles) - in_warm_up,
            "recoveries": metrics.num_recoveries_total, "left": inspection.num_requests,
            "fault_of_pages": inspection.fault, "launches": metrics.num_launches_total,
            "environment": describe_environment(),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=12, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument("--method", choices=("plain", "ngram", "draft_model", "eagle3"), default="draft_model")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    found = asyncio.run(run(args))
    text = json.dumps(found, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 1 if any(found[name] for name in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())

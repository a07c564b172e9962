"""The two comparisons of `bench_vs_transformers.py`: how each side is set up, timed and checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cpu_bench.random_models import qwen3_config, write_random_checkpoint
from jaxinfer import LLM, SamplingParams

# Two implementations round differently; where the best two logits lie closer than this, either token may be the best.
NEAR_TIE = 1e-3

SERVING_MODEL = {"num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64,
                 "intermediate_size": 1536, "vocab_size": 32000}  # fmt: skip
SERVING_REQUESTS = {"num_requests": 32, "shortest": 16, "longest": 128}
SERVING_ENGINE: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_model_len": 256,
    "kv_cache_tokens": 8192,
}
# Room for all requests at full length, and for as many tokens a step as this engine has.
CONTINUOUS_BATCHING = {"page_size": 16, "num_blocks": 640, "max_batch_tokens": 512}

DECODE_MODEL = {"num_layers": 28, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
                "intermediate_size": 3072, "vocab_size": 151936}  # fmt: skip
DECODE_REQUEST = {"prompt_tokens": 32, "output_tokens": 65}
DECODE_ENGINE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "kv_cache_tokens": 256,
}

Call = Callable[..., dict[str, Any]]
# Prompts and limits of output tokens -> the outputs' tokens, and the seconds they took.
Method = Callable[[list[list[int]], list[int]], dict[str, Any]]


def compare_serving(
    folder: Path, torch_worker: Call, *, rounds: int, seed: int, tensor_parallel_size: int
) -> dict[str, Any]:
    """32 requests through every method, `rounds` times in turn; useful output tokens per second of the best round.

    This engine takes part twice: as one device, whose operations all cores share, and as several of one core each.
    """
    write_random_checkpoint(folder, qwen3_config(**SERVING_MODEL), seed=seed)
    prompts, limits = random_requests(vocab_size=SERVING_MODEL["vocab_size"], seed=seed, **SERVING_REQUESTS)
    engines = {}
    for size in sorted({1, tensor_parallel_size}):
        name = "jaxinfer" if size == 1 else f"jaxinfer, tensor_parallel_size={size}"
        engines[name] = LLM(
            folder, skip_tokenizer_init=True, dtype="float32", tensor_parallel_size=size, **SERVING_ENGINE
        )
        engines[name].warm_up()
    peer = torch_worker("load", directory=str(folder))
    methods: dict[str, Method] = {
        **{name: partial(generate, llm) for name, llm in engines.items()},
        "transformers generate, one by one": lambda prompts, limits: torch_worker(
            "one_by_one", prompts=prompts, max_new_tokens=limits
        ),
        "transformers generate, padded batch": lambda prompts, limits: torch_worker(
            "padded_batch", prompts=prompts, max_new_tokens=limits
        ),
        "transformers continuous batching": lambda prompts, limits: torch_worker(
            "continuous_batching", prompts=prompts, max_new_tokens=limits, **CONTINUOUS_BATCHING
        ),
    }
    compiles = sum(llm.get_metrics().num_compiles_total for llm in engines.values())
    runs = run_in_turn(methods, prompts, limits, rounds)
    compiles = sum(llm.get_metrics().num_compiles_total for llm in engines.values()) - compiles
    reference = runs["transformers generate, one by one"][0]["tokens"]
    reference_margins = torch_worker("margins", prompts=prompts, tokens=reference)["outputs"]
    useful = sum(limits)
    seconds = {name: [run["seconds"] for run in of_method] for name, of_method in runs.items()}
    rates = {name: useful / min(times) for name, times in seconds.items()}
    agreement = {
        name: compare_tokens(reference, reference_margins, [run["tokens"] for run in of_method])
        for name, of_method in runs.items()
    }
    return {
        "model": SERVING_MODEL | {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "dtype": "float32"},
        "requests": SERVING_REQUESTS | {"prompt_tokens": sum(map(len, prompts)), "output_tokens": useful},
        "engine": SERVING_ENGINE,
        "continuous_batching": CONTINUOUS_BATCHING,
        "transformers": peer,
        "seconds": seconds,
        "output_tokens_per_second": rates,
        "ratio": {
            engine: {name: rates[engine] / rate for name, rate in rates.items() if name not in engines}
            for engine in engines
        },
        "compiles_while_timed": compiles,
        "smallest_margin": min(min(output["margin"]) for output in reference_margins),
        "agreement": agreement,
        "tokens_agree": all(found["mismatches"] == 0 for found in agreement.values()),
    }


def compare_decode(folder: Path, torch_worker: Call, *, rounds: int, seed: int) -> dict[str, Any]:
    """One sequence on the shapes of Qwen3-0.6B: tokens per second between the first output token and the last."""
    write_random_checkpoint(folder, qwen3_config(**DECODE_MODEL), seed=seed)
    length, count = DECODE_REQUEST["prompt_tokens"], DECODE_REQUEST["output_tokens"]
    prompts, _ = random_requests(
        vocab_size=DECODE_MODEL["vocab_size"], seed=seed, num_requests=1, shortest=length, longest=length
    )
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", **DECODE_ENGINE)
    llm.warm_up()
    peer = torch_worker("load", directory=str(folder))
    methods: dict[str, Method] = {}
    for limit in (1, count):
        methods[f"jaxinfer {limit}"] = lambda prompts, _, limit=limit: generate(llm, prompts, [limit])
        methods[f"transformers {limit}"] = lambda prompts, _, limit=limit: torch_worker(
            "one_by_one", prompts=prompts, max_new_tokens=[limit]
        )
    compiles = llm.get_metrics().num_compiles_total
    runs = run_in_turn(methods, prompts, [count], rounds)
    best = {name: min(run["seconds"] for run in of_method) for name, of_method in runs.items()}
    rates = {name: (count - 1) / (best[f"{name} {count}"] - best[f"{name} 1"]) for name in ("jaxinfer", "transformers")}
    reference = runs[f"transformers {count}"][0]["tokens"]
    margins = torch_worker("margins", prompts=prompts, tokens=reference)["outputs"]
    agreement = {
        name: compare_tokens(reference, margins, [run["tokens"] for run in runs[f"{name} {count}"]])
        for name in ("jaxinfer", "transformers")
    }
    return {
        "model": DECODE_MODEL | {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "dtype": "float32"},
        "request": DECODE_REQUEST,
        "engine": DECODE_ENGINE,
        "transformers": peer,
        "seconds": {name: [run["seconds"] for run in of_method] for name, of_method in runs.items()},
        "decode_tokens_per_second": rates,
        "ratio": rates["jaxinfer"] / rates["transformers"],
        "compiles_while_timed": llm.get_metrics().num_compiles_total - compiles,
        "smallest_margin": min(margins[0]["margin"]),
        "agreement": agreement,
        "tokens_agree": all(found["mismatches"] == 0 for found in agreement.values()),
    }


def random_requests(
    *, num_requests: int, shortest: int, longest: int, vocab_size: int, seed: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts of random tokens and numbers of tokens to generate, both of `shortest` to `longest`."""
    rng = np.random.default_rng(seed)
    lengths, limits = rng.integers(shortest, longest, (2, num_requests), endpoint=True).tolist()
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths], limits


def generate(llm: LLM, prompts: Sequence[list[int]], limits: Sequence[int]) -> dict[str, Any]:
    """Greedy outputs of this engine, with nothing cached of earlier rounds, and the seconds they took."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True) for limit in limits]
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return {"seconds": time.perf_counter() - begin, "tokens": [output.outputs[0].token_ids for output in outputs]}


def run_in_turn(
    methods: dict[str, Method], prompts: list[list[int]], limits: list[int], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Every method once in each round, so that all meet the same machine; before, each runs two requests uncounted."""
    for run in methods.values():
        run(prompts[:2], limits[:2])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for number in range(1, rounds + 1):
        for name, run in methods.items():
            runs[name].append(run(prompts, limits))
            print(f"round {number}: {name}: {runs[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return runs


def compare_tokens(
    reference: list[list[int]], margins: list[dict[str, list]], runs: list[list[list[int]]]
) -> dict[str, Any]:  # fmt: skip
    """How many requests have the reference's tokens in all runs, and where and how narrowly the others leave them.

    A request that leaves where the reference's two best logits are a near tie is listed, but no mismatch.
    """
    departures = []
    for number, (expected, of_request) in enumerate(zip(reference, margins, strict=True)):
        for tokens in (run[number] for run in runs):
            if tokens == expected:
                continue
            position = next(
                (i for i, pair in enumerate(zip(expected, tokens, strict=False)) if pair[0] != pair[1]),
                min(len(expected), len(tokens)),
            )
            margin = of_request["margin"][position] if len(tokens) == len(expected) else None
            departures.append({"request": number, "position": position, "margin": margin})
            break
    mismatches = [found for found in departures if found["margin"] is None or found["margin"] >= NEAR_TIE]
    return {"equal": len(reference) - len(departures), "departures": departures, "mismatches": len(mismatches)}

"""How much of a run on the CPU is matrix products: time the serving requests of `bench_vs_transformers.py`, and in turn
the products of the same launches alone, as XLA runs them.

The difference of the two sums is attention, norms, sampling, launches and the host; no change of those makes a run
faster than its products.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from rich.console import Console
from rich.table import Table

from cpu_bench.comparisons import SERVING_ENGINE, SERVING_MODEL, SERVING_REQUESTS, generate, random_requests
from cpu_bench.random_models import qwen3_config, random_model, write_random_checkpoint
from jaxinfer import LLM
from jaxinfer.attention.backend import select_backend
from jaxinfer.bench.environment import describe_environment
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.planning.arithmetic import product_operations
from jaxinfer.programs.batch_layout import BatchShape, unpack
from jaxinfer.programs.program import Program
from jaxinfer.sampling.next_tokens import logits_and_greedy

STEPS_A_LAUNCH = 4  # of products, so that a launch costs as little of a step as in a decode loop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="the best of N counts; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    result = measure(SERVING_MODEL, SERVING_REQUESTS, SERVING_ENGINE, rounds=args.rounds)
    result |= {"threads": len(os.sched_getaffinity(0)), "environment": describe_environment()}
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(
    model: dict[str, int], requests: dict[str, int], engine: dict[str, Any], *, rounds: int, seed: int = 0
) -> dict[str, Any]:
    """Seconds of the run and of its products in the best of `rounds`, and the products of each shape of launch."""
    config = qwen3_config(**model)
    prompts, limits = random_requests(vocab_size=model["vocab_size"], seed=seed, **requests)
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), config, seed=seed)
        llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", **engine)
    llm.warm_up()
    steps = record_steps(llm, lambda: generate(llm, prompts, limits))
    calls = products_of(random_model(config, seed=seed), list(steps))
    run: list[float] = []
    alone: dict[BatchShape, list[float]] = {shape: [] for shape in steps}
    for number in range(1, rounds + 1):
        run.append(generate(llm, prompts, limits)["seconds"])
        for shape, call in calls.items():
            begin = time.perf_counter()
            call().block_until_ready()
            alone[shape].append((time.perf_counter() - begin) / STEPS_A_LAUNCH)
        print(f"round {number}: {run[-1]:.2f} s", file=sys.stderr, flush=True)
    shapes = [
        {
            "tokens": shape.num_tokens,
            "logits": shape.num_logits,
            "steps": count,
            "products_ms": 1e3 * min(alone[shape]),
            "gflop": product_operations(config, tokens=shape.num_tokens, logits=shape.num_logits) / 1e9,
        }
        for shape, count in sorted(steps.items(), key=lambda item: -item[0].num_tokens)
    ]
    return {
        "model": model,
        "requests": requests,
        "engine": engine,
        "rounds": rounds,
        "run_seconds": min(run),
        "products_seconds": sum(row["steps"] * row["products_ms"] for row in shapes) / 1e3,
        "shapes": shapes,
    }


def record_steps(llm: LLM, run: Callable[[], object]) -> Counter[BatchShape]:
    """How many steps of each shape `run` takes."""
    steps: Counter[BatchShape] = Counter()
    core = llm.core
    launch = core.runner.launch

    def recorded(program: Program, shape: Any, *inputs: Any) -> Any:
        if program is core.programs.step:
            steps[shape] += 1
        elif program is core.programs.decode_loop:
            steps[shape] += int(unpack(inputs[0], shape).num_steps.max())
        return launch(program, shape, *inputs)

    core.runner.launch = recorded
    try:
        run()
    finally:
        del core.runner.launch
    return steps


def products_of(model: DecoderLM, shapes: list[BatchShape]) -> dict[BatchShape, Callable[[], jax.Array]]:
    """For each shape a call that runs the products of `STEPS_A_LAUNCH` steps, compiled and run once."""
    graph, state = nnx.split(model)
    state = jax.tree.map(jnp.asarray, state)

    @jax.jit
    def run(state: nnx.State, x: jax.Array, rows: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        return jax.lax.fori_loop(0, STEPS_A_LAUNCH, lambda _, x: _products_of_a_step(model, x, rows), x)

    calls: dict[BatchShape, Callable[[], jax.Array]] = {}
    for shape in shapes:
        x = jax.random.normal(jax.random.key(0), (shape.num_tokens, model.config.hidden_size))
        calls[shape] = partial(run, state, x, jnp.arange(shape.num_logits))
        calls[shape]().block_until_ready()
    return calls


def _products_of_a_step(model: DecoderLM, x: jax.Array, rows: jax.Array) -> jax.Array:
    """x float32 [T, hidden] through every product of the model one after the other, the head for the tokens `rows`."""
    residual = select_backend().residual(len(x))
    y = residual.from_tokens(x)
    for layer in model.layers:
        qkv = layer.attention.qkv(y, residual)
        queries = lax.slice_in_dim(qkv, 0, model.config.group_size, axis=residual.features_axis - 1)
        y = layer.attention.o(queries, residual)
        gate = lax.index_in_dim(layer.mlp.gate_up(y, residual), 0, residual.features_axis, keepdims=False)
        y = layer.mlp.down(gate, residual)
    x = residual.to_tokens(y)
    # What comes out depends on the head's product, or XLA would leave it out.
    return x.at[0, 0].add(logits_and_greedy(model, x[rows])[1][0].astype(x.dtype))


def print_table(result: dict[str, Any]) -> None:
    table = Table(title="matrix products of the run's launches, alone", title_justify="left")
    for heading in ("tokens of a step", "logits", "steps", "ms a step", "GFLOP/s", "s in all"):
        table.add_column(heading, justify="right")
    for row in result["shapes"]:
        rate, total = row["gflop"] / row["products_ms"] * 1e3, row["steps"] * row["products_ms"] / 1e3
        cells = (row["tokens"], row["logits"], row["steps"], f"{row['products_ms']:.2f}", f"{rate:.0f}", f"{total:.3f}")
        table.add_row(*map(str, cells))
    console = Console()
    console.print(table)
    run, products = result["run_seconds"], result["products_seconds"]
    console.print(f"products {products:.2f} s, the whole run {run:.2f} s: {products / run:.0%} of it")


if __name__ == "__main__":
    sys.exit(main())

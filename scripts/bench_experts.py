"""A layer of experts whose work grows with tokens, against one in which every expert computes every token, by turns."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxinfer.attention.residual import PLAIN
from jaxinfer.bench.environment import describe_environment
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts import SparseMLP
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.layers import ACTIVATIONS

TOKENS = (1, 4, 16, 64, 256, 512)


def dense(mlp: SparseMLP, tokens: jax.Array) -> jax.Array:
    """The same sum over all experts, those that a token does not go to with a weight of 0."""
    experts, weights = mlp.router(tokens)
    gate_up, down = mlp.gate_up.kernel[...], mlp.down.kernel[...]
    whole = (
        jnp.zeros((len(tokens), len(gate_up)), jnp.float32).at[jnp.arange(len(tokens))[:, None], experts].set(weights)
    )
    found = jnp.einsum("th,efsh->etfs", tokens, gate_up)
    gated = ACTIVATIONS[mlp.act](found[..., 0]) * found[..., 1]
    return jnp.einsum("te,etf,ehf->th", whole, gated, down)


def measure(config: ModelConfig, count: int, rounds: int) -> dict[str, Any]:
    """Medians of so many rounds, in milliseconds."""
    mlp = SparseMLP(config, jnp.dtype(jnp.float32), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (count, config.hidden_size), jnp.float32)
    graph, state = nnx.split(mlp)
    ways: dict[str, Callable[..., jax.Array]] = {
        "sparse": jax.jit(lambda state, x: nnx.merge(graph, state)(x, PLAIN)),
        "dense": jax.jit(lambda state, x: dense(nnx.merge(graph, state), x)),
    }
    found = {name: jax.block_until_ready(run(state, x)) for name, run in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(state, x))
            times[name].append(time.perf_counter() - begin)
    sparse, every = (1000 * statistics.median(times[name]) for name in ways)
    apart = float(jnp.abs(found["sparse"] - found["dense"]).max())
    return {"tokens": count, "sparse_ms": sparse, "dense_ms": every, "ratio": every / sparse, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--top", type=int, default=4, help="experts of a token (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--inner", type=int, default=256, help="of an expert (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    options = parser.parse_args()
    config = ModelConfig(
        "Qwen3MoeForCausalLM", vocab_size=8, hidden_size=options.hidden, intermediate_size=options.inner, num_layers=1,
        num_heads=4, num_kv_heads=1, head_dim=64, max_position_embeddings=64,
        experts=ExpertsConfig(options.experts, options.top, options.inner),
    )  # fmt: skip
    rows = [measure(config, count, options.rounds) for count in TOKENS]
    table = Table(title=f"{options.experts} experts, {options.top} of a token", title_justify="left")
    for name in ("tokens", "sparse, ms", "all experts, ms", "faster", "apart"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (f"{row['sparse_ms']:.2f}", f"{row['dense_ms']:.2f}", f"{row['ratio']:.1f}x")
        table.add_row(str(row["tokens"]), *times, f"{row['apart']:.0e}")
    Console(width=100).print(table)
    if options.json is not None:
        report = {"environment": describe_environment(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

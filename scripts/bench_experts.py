"""Sparse mixtures of experts (work grows with the routed tokens) against dense ones (every expert computes all tokens):
one layer, and the decode steps of one request; the two alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from cpu_bench.random_models import random_model
from jaxinfer.attention.backend import AttentionBackend, select_backend
from jaxinfer.attention.residual import PLAIN
from jaxinfer.bench.environment import describe_environment
from jaxinfer.config import EngineConfig
from jaxinfer.engine import core
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts import SparseMLP
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request

TOKENS = (1, 4, 16, 64, 256, 512)
LAYERS, VOCAB, DECODED = 4, 4096, 96


def dense(
    mixture: Callable[..., jax.Array], given: Sequence[jax.Array], gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Compute the mixture's sum over all experts; those that a token is not routed to have a weight of 0."""
    tokens, experts, weights = given
    whole = (
        jnp.zeros((len(tokens), len(gate_up)), jnp.float32).at[jnp.arange(len(tokens))[:, None], experts].set(weights)
    )
    found = jnp.einsum("th,efsh->etfs", tokens, gate_up)
    gated = jax.nn.silu(found[..., 0]) * found[..., 1]
    return jnp.einsum("te,etf,ehf->th", whole, gated, down)


def all_experts(name: str) -> AttentionBackend:
    """The usual way of running, but for experts."""
    usual = select_backend(name)
    return replace(usual, residual=lambda tokens: replace(usual.residual(tokens), over_experts=dense))


def measure(config: ModelConfig, count: int, rounds: int) -> dict[str, Any]:
    """Medians of so many rounds, in milliseconds."""
    mlp = SparseMLP(config, jnp.dtype(jnp.float32), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (count, config.hidden_size), jnp.float32)
    graph, state = nnx.split(mlp)
    ways: dict[str, Callable[..., jax.Array]] = {
        "sparse": jax.jit(lambda state, x: nnx.merge(graph, state)(x, PLAIN)),
        "dense": jax.jit(lambda state, x: nnx.merge(graph, state)(x, replace(PLAIN, over_experts=dense))),
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


def measure_decoding(config: ModelConfig, rounds: int) -> dict[str, Any]:
    """Medians of so many rounds, in milliseconds a step, of greedy decoding by an engine."""
    model = random_model(config)
    limits = EngineConfig(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=32, kv_cache_tokens=256)
    engines = {"sparse": EngineCore(model, limits, dtype=jnp.dtype(jnp.float32))}
    with patch.object(core, "select_backend", all_experts):
        engines["dense"] = EngineCore(model, limits, dtype=jnp.dtype(jnp.float32))
    times: dict[str, list[float]] = {name: [] for name in engines}
    tokens = {}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            seconds, tokens[name] = decode(engine, str(number))
            if number:  # the first time compiles
                times[name].append(seconds)
    sparse, every = (1000 * statistics.median(times[name]) for name in engines)
    same = tokens["sparse"] == tokens["dense"]
    return {"layers": LAYERS, "sparse_ms": sparse, "dense_ms": every, "ratio": every / sparse, "same_tokens": same}


def decode(engine: EngineCore, name: str) -> tuple[float, list[int]]:
    """Seconds a step of a request after its first token, and its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    request = Request(
        request_id=name, sampling_params=params, request_key=(0, 0), prompt_token_ids=[1, 2, 3],
        max_total_tokens=3 + DECODED,
    )  # fmt: skip
    engine.add_request(request)
    begin, before = 0.0, 0
    while engine.has_unfinished_requests():
        engine.step()
        if not begin and request.num_output_tokens:
            begin, before = time.perf_counter(), request.num_output_tokens
    return (time.perf_counter() - begin) / (DECODED - before), list(request.token_ids)


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
        "Qwen3MoeForCausalLM", vocab_size=VOCAB, hidden_size=options.hidden, intermediate_size=options.inner,
        num_layers=LAYERS, num_heads=8, num_kv_heads=2, head_dim=64, max_position_embeddings=256, qk_norm=True,
        tie_word_embeddings=True, experts=ExpertsConfig(options.experts, options.top, options.inner),
    )  # fmt: skip
    rows = [measure(config, count, options.rounds) for count in TOKENS]
    table = Table(title=f"{options.experts} experts, {options.top} of a token", title_justify="left")
    for name in ("tokens", "sparse, ms", "all experts, ms", "faster", "apart"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (f"{row['sparse_ms']:.2f}", f"{row['dense_ms']:.2f}", f"{row['ratio']:.1f}x")
        table.add_row(str(row["tokens"]), *times, f"{row['apart']:.0e}")
    Console(width=100).print(table)
    step = measure_decoding(config, options.rounds)
    print(
        f"a decode step of {LAYERS} layers for one request: {step['sparse_ms']:.2f} ms, with all experts "
        f"{step['dense_ms']:.2f} ms, {step['ratio']:.1f}x; same tokens: {step['same_tokens']}"
    )
    if options.json is not None:
        report = {"environment": describe_environment(), "rows": rows, "decode_step": step}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure what a program costs at a start that finds all compiled programs on disk: tracing, lowering, loading.

    .venv/bin/python scripts/bench_start.py
    .venv/bin/python scripts/bench_start.py --config tests/fixtures/configs/qwen3-0.6b --dtype bfloat16 --layers 8 28

Weights and KV exist as shapes only. The programs are compiled once, into a fresh folder; then JAX's caches are
cleared, and they are made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.checkpoint.directory import read_config
from jaxinfer.checkpoint.load import module_around
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.decode_loop import DecodeLoop
from jaxinfer.programs.program import TARGET
from jaxinfer.programs.runner import Runner, initial_state
from jaxinfer.programs.step import Step

SMALL = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position_embeddings=4096, qk_norm=True, tie_word_embeddings=True,
)  # fmt: skip
PAGE_SIZE, NUM_PAGES, SEATS, LOOP_STEPS = 16, 1024, 16, 16
DECODES = BatchShape(decode_rows=16, prefill_rows=0, prefill_tokens=0, pages_per_row=16)
MIXED = BatchShape(decode_rows=16, prefill_rows=4, prefill_tokens=240, pages_per_row=16, num_logits=16)
# Columns, and JAX's names for what they hold.
EVENTS = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lower": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "load": "/jax/core/compile/backend_compile_duration",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a folder with a config.json; without it, a small model")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 36])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    config = SMALL if arguments.config is None else read_config(arguments.config)[1]
    seconds: dict[str, float] = defaultdict(float)

    def add(event: str, duration_secs: float, **_: str | int) -> None:
        seconds[event] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    table = Table("layers", "program", *EVENTS, "in all", title="seconds")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        for layers in arguments.layers:
            deep = dataclasses.replace(config, num_layers=layers, dtype=arguments.dtype)
            compile_all(deep)
            jax.clear_caches()
            for name, spent in compile_all(deep, seconds).items():
                columns = [spent[event] for event in EVENTS.values()]
                table.add_row(str(layers), name, *(f"{value:.2f}" for value in (*columns, sum(columns))))
    Console().print(table)


def compile_all(config: ModelConfig, seconds: dict[str, float] | None = None) -> dict[str, dict[str, float]]:
    """Compile or load every program; what `seconds`, where JAX's events are added up, came to for each."""
    dtype = jnp.dtype(config.dtype)
    shapes = {parameter.path: jax.ShapeDtypeStruct(parameter.shape, dtype) for parameter in parameters(config)}
    cache = KVPool.shapes(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype)
    model = module_around(config, shapes)
    runner = Runner({TARGET: model}, initial_state(cache, SEATS, config.vocab_size), select_backend())
    step, loop = Step(), DecodeLoop(LOOP_STEPS)
    programs = {"decode step": (step, DECODES), "mixed step": (step, MIXED), "decode loop": (loop, DECODES)}
    spent = {}
    for name, (program, shape) in programs.items():
        if seconds is not None:
            seconds.clear()
        runner.compile(program, shape)
        spent[name] = dict(seconds or {})
    return spent


if __name__ == "__main__":
    main()

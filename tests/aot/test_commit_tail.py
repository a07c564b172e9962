"""`commit_tail` over KV pools of real models, compiled for an H200: in place in all layers, no copy of a pool."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_pool import KVPool, kv_bytes_per_token
from jaxinfer.checkpoint.directory import read_config
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from jaxinfer.programs.commit_tail import commit_tail

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"
BF16 = jnp.dtype(jnp.bfloat16)
NUM_PAGES, PAGE_SIZE = 8192, 16
# Of a model, rows and nodes.
SHAPES = {
    "one_node": ("qwen3-8b", 1, 1),
    "one_row": ("qwen3-8b", 1, 8),
    "64_rows": ("qwen3-8b", 64, 8),
    "64_rows_of_64_nodes": ("qwen3-8b", 64, 64),
    "llama": ("llama-3.1-8b", 64, 8),
    "small": ("qwen3-0.6b", 64, 8),
}


@pytest.fixture(scope="module", params=SHAPES)
def program(request) -> tuple[ModelConfig, int, jax.stages.Compiled]:
    """The model, how many slots move, and the compiled program."""
    name, rows, nodes = SHAPES[request.param]
    config = read_config(CONFIGS / name)[1]
    pool = KVPool.shapes(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=BF16)
    ends = jax.ShapeDtypeStruct((rows, nodes), jnp.int32)
    return config, rows * nodes, compile_target(H200).compile(commit_tail, pool, ends, ends, donate_argnums=0)


def test_the_pool_is_updated_in_place(program):
    config, _, compiled = program
    assert compiled.memory_analysis().alias_size_in_bytes == NUM_PAGES * PAGE_SIZE * kv_bytes_per_token(config, BF16)


def test_temporaries_are_the_slots_that_move(program):
    config, moves, compiled = program
    # At most everything that moves is held at once between reading and writing; the rest are slot numbers.
    assert compiled.memory_analysis().temp_size_in_bytes <= moves * kv_bytes_per_token(config, BF16) + 64 * 1024


def test_there_is_at_most_one_read_and_one_write_for_each_array_and_no_loop(program):
    config, _, compiled = program
    launched = compiled.as_text().partition("\nENTRY ")[2]
    kernels = len(re.findall(r" (?:fusion|gather|scatter|copy|custom-call)\(", launched))
    assert 2 * config.num_layers < kernels <= 4 * config.num_layers
    assert " while(" not in launched, "a loop would wait for the host"


def test_nothing_as_large_as_a_layer_of_the_pool_is_copied(program):
    config, _, compiled = program
    text = compiled.as_text()
    pool = rf"bf16\[({NUM_PAGES},{PAGE_SIZE}|{NUM_PAGES * PAGE_SIZE}),{config.num_kv_heads},{config.head_dim}\]"
    assert re.search(pool, text), "the pool has another shape in this program"
    assert not re.search(rf"= \(?{pool}\S* (copy|copy-start|transpose)\(", text)

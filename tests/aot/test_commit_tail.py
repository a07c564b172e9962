"""`commit_tail` over the KV pool of Qwen3-8B, compiled for an H200: in place in all layers, and no copy of the pool."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.engine.commit_tail import commit_tail
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200

LAYERS, KV_HEADS, HEAD_DIM = 36, 8, 128
NUM_PAGES, PAGE_SIZE = 8192, 16
SLOT_BYTES = KV_HEADS * HEAD_DIM * 2
LAYER_BYTES = NUM_PAGES * PAGE_SIZE * SLOT_BYTES  # of keys, and as many of values
SHAPES = {"one_node": (1, 1), "one_row": (1, 8), "64_rows": (64, 8), "64_rows_of_64_nodes": (64, 64)}


@pytest.fixture(scope="module", params=SHAPES)
def program(request) -> tuple[int, jax.stages.Compiled]:
    """How many slots move, and the compiled program."""
    rows, nodes = SHAPES[request.param]
    pages = jax.ShapeDtypeStruct((NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    pool = KVCache(k=(pages,) * LAYERS, v=(pages,) * LAYERS)  # type: ignore[arg-type]
    ends = jax.ShapeDtypeStruct((rows, nodes), jnp.int32)
    return rows * nodes, compile_target(H200).compile(commit_tail, pool, ends, ends, donate_argnums=0)


def test_the_pool_is_updated_in_place(program):
    _, compiled = program
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * LAYERS * LAYER_BYTES


def test_temporaries_are_the_slots_that_move(program):
    moves, compiled = program
    # At most everything that moves is held at once between reading and writing; the rest are slot numbers.
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * LAYERS * moves * SLOT_BYTES + 64 * 1024


def test_there_is_at_most_one_read_and_one_write_for_each_array_and_no_loop(program):
    _, compiled = program
    launched = compiled.as_text().partition("\nENTRY ")[2]
    kernels = len(re.findall(r" (?:fusion|gather|scatter|copy|custom-call)\(", launched))
    assert 2 * LAYERS < kernels <= 4 * LAYERS
    assert " while(" not in launched, "a loop would wait for the host"


def test_nothing_as_large_as_a_layer_of_the_pool_is_copied(program):
    _, compiled = program
    text = compiled.as_text()
    pool = rf"bf16\[({NUM_PAGES},{PAGE_SIZE}|{NUM_PAGES * PAGE_SIZE}),{KV_HEADS},{HEAD_DIM}\]"
    assert re.search(pool, text), "the pool has another shape in this program"
    assert not re.search(rf"= \(?{pool}\S* (copy|copy-start|transpose)\(", text)

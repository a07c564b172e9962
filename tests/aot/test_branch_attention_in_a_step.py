"""A model's forward pass with our kernels, compiled for an H200: how many of them a layer has, and no copy of KV."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_pool import KVPool, kv_bytes_per_token
from jaxinfer.models.registry import build_model
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, unpack
from jaxinfer.programs.forward import forward
from tests.builders import model_config

PAGE_SIZE, NUM_PAGES, LAYERS = 16, 4096, 2
CONFIG = model_config(
    num_heads=16, num_kv_heads=8, head_dim=128, hidden_size=256, intermediate_size=512, num_layers=LAYERS
)
SHAPES = {
    "decode": BatchShape(decode_rows=64, prefill_rows=0, prefill_tokens=0, pages_per_row=256),
    "prefill": BatchShape(decode_rows=0, prefill_rows=4, prefill_tokens=1024, pages_per_row=256),
    "mixed": BatchShape(decode_rows=64, prefill_rows=4, prefill_tokens=512, pages_per_row=256),
}


@pytest.fixture(scope="module", params=SHAPES)
def program(request) -> tuple[BatchShape, jax.stages.Compiled, int]:
    """The shape, the compiled pass and the bytes of its KV pool."""
    shape = SHAPES[request.param]
    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(CONFIG, dtype=jnp.bfloat16)))
    cache = KVPool.shapes(CONFIG, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.dtype(jnp.bfloat16))
    kv_bytes = NUM_PAGES * PAGE_SIZE * kv_bytes_per_token(CONFIG, jnp.dtype(jnp.bfloat16))
    buffer = jax.ShapeDtypeStruct(PackedBatch(shape).buffer.shape, jnp.int32)

    def run(state, cache, buffer):
        return forward(nnx.merge(graph, state), cache, unpack(buffer, shape), select_backend("pallas"))

    return shape, compile_target(H200).compile(run, state, cache, buffer, donate_argnums=1), kv_bytes


def test_every_layer_attends_once_for_each_group_of_rows_writes_once_and_adds_twice(program):
    shape, compiled, _ = program
    groups = bool(shape.decode_rows) + bool(shape.prefill_tokens)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == (groups + 3) * LAYERS


def test_only_the_kernel_that_writes_in_place_makes_arrays_of_the_pools_shape(program):
    _, compiled, _ = program
    pool = f"bf16[{NUM_PAGES},{PAGE_SIZE},{CONFIG.num_kv_heads},{CONFIG.head_dim}]"
    entry = compiled.as_text().partition("\nENTRY ")[2]
    made = [line for line in entry.splitlines() if pool in line.partition(" = ")[2].split("(%")[0]]
    makers = [line for line in made if not re.search(r" (parameter|get-tuple-element|tuple)\(", line)]
    assert len(makers) == LAYERS
    assert all("rotate_and_write" in line and "output_to_operand_aliasing={{1}" in line for line in makers)


def test_the_pool_is_updated_in_place_and_never_copied(program):
    _, compiled, kv_bytes = program
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes / 16

"""The kernel that rotates heads and writes K and V compiles for an H200, and writes into the pool in place."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from kernels_pallas.rotate_and_write.api import rotate_and_write
from tests.kernels.rotate_and_write_cases import CASES


def refuse(*_):
    raise AssertionError("the reference was asked instead of the kernel")


def compiled(heads, pages, slot_mapping) -> jax.stages.Compiled:
    kernel = partial(rotate_and_write, reference=refuse)
    return compile_target(H200).compile(kernel, heads, *pages, slot_mapping, donate_argnums=(1, 2))


def check(program: jax.stages.Compiled, page_bytes: int) -> None:
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 1
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == page_bytes
    assert memory.temp_size_in_bytes < page_bytes / 8


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_table_compiles(name):
    case = CASES[name]
    check(compiled(case.heads, case.pages, case.slot_mapping), 2 * case.pages[0].nbytes)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("scales", ["bfloat16", "float32", None])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (64, 8, 128), (14, 2, 64), (32, 16, 256)]
)
def test_a_serving_shape_compiles_and_spills_nothing(heads, kv_heads, head_dim, scales, tokens, ptxas):
    def array(*extent: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extent, dtype)

    angles = array(tokens, head_dim // 2, dtype=jnp.float32)
    scale = None if scales is None else array(head_dim, dtype=jnp.dtype(scales))
    qkv = array(tokens, kv_heads, heads // kv_heads + 2, head_dim)
    projected = ProjectedHeads(qkv, angles, angles, scale, scale, eps=1e-6)  # type: ignore[arg-type]
    pages = array(4096, 16, kv_heads, head_dim)
    check(compiled(projected, (pages, pages), array(tokens, dtype=jnp.int32)), 2 * 2 * pages.size)
    [report] = ptxas()
    assert (report.kernel, report.spilled, report.serialised) == ("rotate_and_write", 0, ())

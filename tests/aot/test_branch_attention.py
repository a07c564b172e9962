"""The branch attention kernel compiles for an H200, in both forms and in all the shapes that it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.attention.metadata import AttentionMetadata
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from kernels_pallas.branch_attention.api import branch_attention, plan_branch_attention
from kernels_pallas.branch_attention.blocks import AttentionSizes
from tests.kernels.branch_attention_cases import CASES
from tests.kernels.branch_attention_checks import scene_of


def refuse(*_, **__):
    raise AssertionError("the reference was asked instead of the kernel")


def compiled(q, k_pages, step, layers: int = 1, **options) -> jax.stages.Compiled:
    def run(q, k_pages, v_pages, step):
        plan = plan_branch_attention(step, AttentionSizes.of(q, k_pages), reference=refuse, **options)
        for _ in range(layers):
            q = branch_attention(q, k_pages, v_pages, plan, scale=0.1)
        return q

    return compile_target(H200).compile(run, q, k_pages, k_pages, step)


def kernels(program: jax.stages.Compiled) -> int:
    return program.as_text().count('custom_call_target="mosaic_gpu')


def check_case(name: str, *, in_registers: bool) -> None:
    scene = scene_of(name)
    tuning = replace(CASES[name].tuning, weights_in_registers=in_registers)
    assert kernels(compiled(scene.q, scene.k_pages, scene.metadata, tuning=tuning))


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_table_compiles_in_the_form_that_is_served(name):
    check_case(name, in_registers=True)


# Nothing is served in this form: what is seldom interpreted is seldom compiled in it too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]
)
def test_a_case_of_the_table_compiles_in_the_form_that_is_interpreted(name):
    check_case(name, in_registers=False)


@dataclass(frozen=True)
class Shape:
    """Sizes of a serving step."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: jnp.dtype = jnp.bfloat16
    decode_rows: int = 32
    decode_width: int = 1
    prefill_rows: int = 0
    prefill_tokens: int = 0
    tail_words: int = 0
    lane_tokens: int = 4096
    has_first: bool = False

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, AttentionMetadata]:
        def ints(*extent: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(extent, dtype)

        tokens = self.decode_rows * self.decode_width + self.prefill_tokens
        rows, pages = self.decode_rows + self.prefill_rows, self.lane_tokens // self.page_size
        step = AttentionMetadata(
            slot_mapping=ints(tokens), row=ints(tokens), limit=ints(tokens), branch=ints(tokens),
            first=ints(tokens if self.has_first else 0),
            tail_bits=ints(tokens, self.tail_words, dtype=jnp.uint32), page_table=ints(rows, pages),
            page_branch=ints(rows, pages), kv_len=ints(rows), trunk_len=ints(rows), tail_start=ints(rows),
            query_start_loc=ints(rows + 1), decode_rows=self.decode_rows, decode_width=self.decode_width,
        )  # fmt: skip
        q = jax.ShapeDtypeStruct((tokens, self.heads, self.head_dim), self.dtype)
        pool = (1024, self.page_size, self.kv_heads, self.head_dim)
        return q, jax.ShapeDtypeStruct(pool, self.dtype), step


PREFILL = {"decode_rows": 0, "prefill_rows": 4, "prefill_tokens": 1024}
SHAPES = {
    "decode": Shape(),
    "decode_of_one_long_lane": Shape(decode_rows=1, lane_tokens=32768),
    "prefill": Shape(**PREFILL),
    "mixed": Shape(prefill_rows=4, prefill_tokens=1024),
    "sixteen_branches": Shape(decode_rows=2, decode_width=16),
    "trees_of_64_nodes": Shape(decode_rows=8, decode_width=64, tail_words=2),
    "trees_of_512_nodes": Shape(decode_rows=1, decode_width=512, tail_words=16),
    "trees_of_512_nodes_heads_of_256": Shape(decode_rows=1, decode_width=512, tail_words=16, head_dim=256),
    "sixteen_branches_heads_of_256": Shape(decode_rows=2, decode_width=16, head_dim=256, lane_tokens=32768),
    "tails_beside_prefill": Shape(decode_width=8, prefill_rows=2, prefill_tokens=256, tail_words=1),
    **{f"prefill_heads_of_{d}": Shape(head_dim=d, **PREFILL) for d in (64, 256)},
    **{f"decode_heads_of_{d}": Shape(head_dim=d) for d in (64, 256)},
    **{f"one_row_heads_of_{d}": Shape(head_dim=d, decode_rows=1, lane_tokens=32768) for d in (64, 256)},
    **{f"pages_of_{size}": Shape(page_size=size, prefill_rows=1, prefill_tokens=128) for size in (32, 64)},
    **{f"a_group_of_{g}": Shape(heads=4 * g, kv_heads=4, **PREFILL) for g in (1, 2, 3, 5, 6, 7, 8, 16)},
    "windows_beside_prefill": Shape(prefill_rows=4, prefill_tokens=1024, has_first=True),
    "windows_of_gpt_oss": Shape(heads=64, head_dim=64, prefill_rows=4, prefill_tokens=1024, has_first=True),
    "windows_of_trees": Shape(decode_rows=8, decode_width=64, tail_words=2, has_first=True),
    "windows_of_branches_heads_of_256": Shape(decode_rows=2, decode_width=16, head_dim=256, has_first=True),
    "windows_of_prefill_heads_of_256": Shape(head_dim=256, has_first=True, **PREFILL),
    "float16": Shape(dtype=jnp.float16, prefill_rows=1, prefill_tokens=128),
}

# What a thread spills today, in bytes stored and loaded. The result of heads of 256 takes half of the registers that
# there are; eight are missing where tails are masked too.
SPILLED = {"trees_of_512_nodes_heads_of_256": 64}


@pytest.mark.parametrize("name", SHAPES)
def test_a_serving_shape_compiles_with_the_sizes_chosen_for_it_and_spills_no_more_than_is_known(name, ptxas):
    shape = SHAPES[name]
    groups = bool(shape.decode_rows) + bool(shape.prefill_tokens)
    assert kernels(compiled(*shape.arguments())) == groups
    reports = ptxas()
    assert [report.kernel for report in reports] == ["branch_attention"] * groups
    assert max(report.spilled for report in reports) <= SPILLED.get(name, 0)
    assert [report.serialised for report in reports] == [()] * groups


def test_the_layers_of_a_step_share_one_plan():
    one, four = (compiled(*Shape().arguments(), layers=layers).as_text().count("fusion(") for layers in (1, 4))
    assert one == four

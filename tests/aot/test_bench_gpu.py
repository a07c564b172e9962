"""The attention programs of the GPU benchmark compile for an H200, so that its rare runs do not fail first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from gpu_bench.attention import attention_program, build_step
from gpu_bench.plan import PAGE_SIZE, attention_heads, parts
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200

CASES = {case["case"]: case for part in parts(smoke=False) for case in part.cases}
LAYERS = 3
HEADS, KV_HEADS, HEAD_DIM = attention_heads(smoke=False)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def compiled(implementation: str, q, k, rest, *, causal: bool = False) -> str:
    program = attention_program(implementation, LAYERS, causal, HEAD_DIM**-0.5)
    return compile_target(H200).compile(program, q, [k] * LAYERS, [k] * LAYERS, rest).as_text()


@pytest.mark.parametrize(
    "name",
    [
        "8 branches over 8,192, one lane: kernel",
        "16 branches over 32,768, lanes of their own: kernel",
        "causal prefill of 2,048: kernel",
        "16 trees of 60 nodes over 2,048: kernel",
    ],
)
def test_a_chain_of_layers_is_a_kernel_for_each_and_one_plan_for_all(name):
    step, num_pages = build_step(CASES[name])
    pool = bf16(num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    text = compiled("kernel", bf16(step.num_tokens, HEADS, HEAD_DIM), pool, step.metadata)
    assert text.count('custom_call_target="mosaic_gpu') >= LAYERS
    # Sorting the pages is the plan's: a plan for every layer would be as many sorts.
    assert sum(" sort(" in line for line in text.splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "queries", "tokens", "masked"), [(32, 1, 8192, False), (1, 8, 8704, True), (16, 60, 2108, True)]
)
def test_cudnn_takes_the_same_tasks(rows, queries, tokens, masked):
    mask = jax.ShapeDtypeStruct((rows, 1, queries, tokens), bool) if masked else None
    k = bf16(rows, tokens, KV_HEADS, HEAD_DIM)
    text = compiled("cudnn", bf16(rows, queries, HEADS, HEAD_DIM), k, mask)
    assert text.count("__cudnn$fmha") == LAYERS


def test_cudnn_takes_a_causal_prefill():
    k = bf16(1, 2048, KV_HEADS, HEAD_DIM)
    text = compiled("cudnn", bf16(1, 2048, HEADS, HEAD_DIM), k, None, causal=True)
    assert text.count("__cudnn$fmha") == LAYERS

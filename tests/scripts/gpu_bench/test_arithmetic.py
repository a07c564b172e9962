"""The floors of the GPU benchmark: bytes and operations against hand-computed figures and against the model itself."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gpu_bench.arithmetic import (
    branch_speedups,
    causal_pairs,
    decode_bytes,
    kv_bytes_per_token,
    prefill_flops,
    weight_bytes_read,
    with_floor,
)
from gpu_bench.plan import MODELS, model_values
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import build_model

CARD = [
    {"part": "card", "case": "read bandwidth", "bytes_per_second": 4e12},
    {"part": "card", "case": "bf16 matmul", "flops_per_second": 800e12},
]


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_reads_every_weight_but_an_embedding_table_that_is_not_the_head(name):
    values = model_values(name, smoke=False)
    model = nnx.eval_shape(lambda: build_model(ModelConfig.from_hf(values), dtype=jnp.bfloat16))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))}
    counted = {path: leaf for path, leaf in leaves.items() if "embed" not in path or values["tie_word_embeddings"]}
    assert len(leaves) - len(counted) == (not values["tie_word_embeddings"])
    assert weight_bytes_read(values) == sum(2 * leaf.size for leaf in counted.values())


def test_the_figures_of_qwen3_8b_are_those_computed_by_hand():
    values = MODELS["Qwen3-8B"]
    assert kv_bytes_per_token(values) == 147456  # 2 x 36 layers x 8 heads x 128 x 2 bytes
    # All 8,190,735,360 parameters less the table of 151,936 x 4,096.
    assert weight_bytes_read(values) == 2 * (8_190_735_360 - 151_936 * 4096)


def test_the_steps_of_a_loop_see_one_token_more_each():
    values = MODELS["Qwen3-0.6B"]
    single = [decode_bytes(values, batch=8, context=1000 + i) for i in range(16)]
    assert decode_bytes(values, batch=8, context=1000, steps=16) == pytest.approx(sum(single) / 16)
    assert single[1] - single[0] == 8 * kv_bytes_per_token(values)


def test_causal_pairs_are_counted_with_the_token_itself():
    assert [causal_pairs(n) for n in (1, 2, 5)] == [1, 3, 15]


def test_the_operations_of_a_prefill_are_those_of_its_matrix_products_and_visible_pairs():
    values = model_values("Qwen3-8B", smoke=True)  # 2 layers: hidden 64, heads 4 and 2 of 64, inner 128, vocabulary 256
    tokens, rows = 10, 3
    products = [(64, 4 * 64), (64, 2 * 64), (64, 2 * 64), (4 * 64, 64), (64, 128), (64, 128), (128, 64)]
    by_layer = sum(2 * tokens * n * m for n, m in products)
    attention = sum(2 * 2 * 64 * 4 for query in range(tokens) for _ in range(query + 1))
    assert prefill_flops(values, tokens, rows) == 2 * (by_layer + attention) + 2 * rows * 64 * 256


def test_the_floor_is_the_longer_of_bytes_and_operations():
    row = {"part": "attention", "case": "a", "ms": 4.0, "bytes": 4e9, "flops": 1600e9}
    assert with_floor(row, CARD) == row | {"floor_ms": 2.0, "share": 0.5}
    assert with_floor(row | {"bytes": 12e9}, CARD)["share"] == 0.75


@pytest.mark.parametrize("row", [{"ms": 4.0}, {"bytes": 4e9}, {"error": "x", "bytes": 4e9}])
def test_a_row_without_a_time_or_without_amounts_has_no_share(row):
    assert with_floor({"part": "decode-8b", "case": "a"} | row, CARD).get("share") is None


def test_there_is_no_share_of_a_rate_that_was_not_measured():
    row = {"part": "attention", "case": "a", "ms": 4.0, "bytes": 4e9, "flops": 1600e9}
    failed = [{"part": "card", "case": "bf16 matmul", "error": "x"}]
    for measured in (CARD[:1], CARD[:1] + failed, CARD[1:], []):
        assert with_floor(row, measured) == row
    assert with_floor({"part": "decode-8b", "case": "a", "ms": 4.0, "bytes": 4e9}, CARD[:1])["share"] == 0.25


def branches(group, kind, **found):
    return {
        "part": "branches",
        "case": f"{group} {kind}",
        "group": group,
        "kind": kind,
        "implementation": "kernel",
    } | found


def test_branches_are_compared_with_lanes_of_the_same_number_and_trunk():
    rows = [
        branches("8 over 8192", "branches", ms=2.0), branches("8 over 8192", "lanes", ms=10.0),
        branches("8 over 8192", "shared", ms=5.0), branches("4 over 8192", "branches", ms=1.0),
        branches("4 over 8192", "lanes", error="x"), branches("16 over 8192", "lanes", ms=1.0),
        branches("8 over 8192", "branches", ms=99.0, implementation="xla"),
    ]  # fmt: skip
    assert branch_speedups(rows) == {"8 over 8192": {"lanes": 5.0, "shared": 2.5}}

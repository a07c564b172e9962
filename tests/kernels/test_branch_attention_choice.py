"""When the branch attention kernel runs, with which sizes, and what happens when it cannot."""

import itertools
import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import select_backend
from kernels_pallas.branch_attention import api
from kernels_pallas.branch_attention.reference import paged_attention, plan_paged_attention
from kernels_pallas.branch_attention.tuning import (
    QUERY_ROWS,
    SHARED_MEMORY_BYTES,
    Tuning,
    choose_tuning,
    shared_memory_bytes,
)
from tests.attention.lanes import plain_lane
from tests.attention.scenes import Heads, make_scene

TAKEN = Heads(4, 2, 64, jnp.bfloat16)


def small_scene(heads: Heads = TAKEN, page_size: int = 16, words: int = 0):
    return make_scene([plain_lane(page_size, 20, 1)], heads=heads, num_words=words)


def reason(heads: Heads = TAKEN, page_size: int = 16, words: int = 0) -> str | None:
    scene = small_scene(heads, page_size, words)
    return api.why_not(scene.metadata, scene.sizes)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 7, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_kernel_takes(head_dim, group, dtype):
    assert all(reason(Heads(2 * group, 2, head_dim, dtype), size, words=16) is None for size in (16, 32, 64))


@pytest.mark.parametrize(
    ("heads", "page_size", "words", "why"),
    [
        (Heads(4, 2, 64, jnp.float32), 16, 0, "q is float32 and the cache float32, both must be one of bfloat16"),
        (Heads(4, 2, 96, jnp.bfloat16), 16, 0, "head_dim is 96, must be one of 64, 128, 256"),
        (TAKEN, 8, 0, "page_size is 8, must be one of 16, 32, 64"),
        (Heads(17, 1, 64, jnp.bfloat16), 16, 0, "17 query heads share 1 KV heads, at most 16 can share one"),
        (TAKEN, 16, 17, "tails have 544 bits, at most 512 are possible"),
    ],
)
def test_the_kernel_does_not_take(heads, page_size, words, why):
    assert why in str(reason(heads, page_size, words))


@pytest.fixture
def nothing_told(monkeypatch):
    monkeypatch.setattr("kernels_pallas.devices._told", set())


def test_what_the_kernel_cannot_run_goes_to_the_reference_with_one_warning(nothing_told, caplog):
    backend = select_backend("pallas")
    scene = small_scene()
    with caplog.at_level(logging.WARNING):
        outs = [scene.run(backend.plan, backend.attention) for _ in range(2)]
        # Another shape with the same reason is planned anew, and not told again.
        make_scene([plain_lane(16, 3, 1)] * 2, heads=TAKEN).run(backend.plan, backend.attention)
    assert np.array_equal(outs[0], scene.run(plan_paged_attention, paged_attention)) and np.array_equal(*outs)
    assert [record.message for record in caplog.records] == [
        "branch attention runs as plain XLA, not as a Mosaic GPU kernel: "
        "the device is 'cpu', the kernel is for H100, H200, H800, H20, GH200"
    ]


def test_another_reason_is_another_warning(nothing_told, caplog):
    backend = select_backend("pallas")
    with caplog.at_level(logging.WARNING):
        small_scene().run(backend.plan, backend.attention)
        small_scene(Heads(4, 2, 8)).run(backend.plan, backend.attention)
    assert len(caplog.records) == 2


def test_on_a_cpu_auto_is_plain_xla_without_a_word(nothing_told, caplog):
    with caplog.at_level(logging.WARNING):
        backend = select_backend("auto")
    assert backend.name == "xla" and backend.attention is paged_attention and not caplog.records


def test_on_a_hopper_gpu_auto_is_the_kernel(monkeypatch):
    gpu = type("Gpu", (), {"device_kind": "NVIDIA H200"})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("kernels_pallas.devices.get_default_device", lambda: gpu)
    assert select_backend("auto").name == "pallas"


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GeForce RTX 4090"])
def test_on_another_gpu_auto_is_plain_xla(monkeypatch, kind):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("kernels_pallas.devices.get_default_device", lambda: type("Gpu", (), {"device_kind": kind})())
    assert select_backend("auto").name == "xla"


GRID = list(itertools.product((1, 5, 64, 512, 2048), (1, 4, 256), (1, 4, 7, 16), (64, 128, 256), (0, 2, 16)))


@pytest.mark.parametrize("in_registers", [True, False])
def test_the_sizes_chosen_fit_the_shared_memory_and_hold_every_token(in_registers):
    for tokens, rows, group, head_dim, words in GRID:
        tuning = choose_tuning(
            tokens_per_row=tokens, rows=rows, kv_heads=8, group=group, head_dim=head_dim, tokens_of_lane=32768,
            tail_words=words, num_cores=132, weights_in_registers=in_registers,
        )  # fmt: skip
        assert shared_memory_bytes(tuning, head_dim, words) <= SHARED_MEMORY_BYTES
        assert tuning.tokens_per_consumer(group) * group <= QUERY_ROWS
        assert tuning.weights_in_registers == in_registers


def sizes(tokens: int, rows: int, lane: int) -> Tuning:
    return choose_tuning(
        tokens_per_row=tokens, rows=rows, kv_heads=8, group=4, head_dim=128, tokens_of_lane=lane, tail_words=0,
        num_cores=132,
    )  # fmt: skip


def test_few_rows_over_long_lanes_are_split_over_the_cores():
    assert [sizes(1, rows, 32768).splits for rows in (1, 4, 64)] == [16, 4, 1]
    assert sizes(1, 1, 512).splits == 2


def test_sixteen_branches_share_one_block_and_long_rows_two_warpgroups():
    assert sizes(16, 2, 8192).tokens_per_block(4) == 16
    assert sizes(16, 2, 8192).consumers == 1
    assert sizes(2048, 1, 8192).consumers == 2


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("consumers", 3, "1 or 2"),
        ("tokens", 0, "between 1 and 64"),
        ("tile", 96, "64 or 128"),
        ("stages", 1, "at least 2"),
        ("splits", 33, "between 1 and 32"),
        ("programs", 0, "at least 1"),
    ],
)
def test_bad_sizes_are_refused_by_name(field, value, allowed):
    with pytest.raises(ValueError, match=f"{field} must be {allowed}, got {value}"):
        replace(Tuning(), **{field: value})

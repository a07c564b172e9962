"""When the kernel that rotates heads and writes K and V runs, and what happens when it cannot."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import select_backend
from kernels_pallas.rotate_and_write import api, reference
from tests.kernels.rotate_and_write_cases import Case

SMALL = Case((3, 40))


def reason(case: Case) -> str | None:
    return api.why_not(case.heads, case.pages[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 7, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_kernel_takes(head_dim, group, dtype):
    for more in ({}, {"norms": False}, {"wide_scales": True}, {"norms": False, "norms_late": True}):
        assert reason(Case((1,), head_dim=head_dim, group=group, dtype=dtype, **more)) is None


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case((1,), dtype=jnp.float32), "heads are float32 and the cache float32, both must be one of bfloat16"),
        (Case((1,), head_dim=96), "head_dim is 96, must be one of 64, 128, 256"),
        (Case((1,), kv_heads=17, group=16), "there are 272 query heads, at most 256 are possible"),
        (Case((1,), kv_heads=112, group=2, head_dim=256), "448 rows of head_dim 256 do not fit the shared memory"),
        (Case((1,), norms_late=True), "the norms of queries and keys follow their rotation"),
    ],
)
def test_the_kernel_does_not_take(case, why):
    assert why in str(reason(case))


def test_parts_that_do_not_fit_are_added_before():
    case = Case((1,), kv_heads=16, group=4, head_dim=128, parts=4)
    whole = replace(api._launch(case.heads, case.heads.qkv, case.pages[0]), parts=0)
    assert whole.shared_memory_bytes < api.SHARED_MEMORY_BYTES < replace(whole, parts=4).shared_memory_bytes
    assert reason(case) is None


@pytest.mark.parametrize("scales", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
def test_the_scales_of_norms_have_the_precision_of_the_heads_or_are_float32(scales):
    q_scale, k_scale = (
        x.astype(dtype) for x, dtype in zip((SMALL.heads.q_scale, SMALL.heads.k_scale), scales, strict=True)
    )
    why = api.why_not(replace(SMALL.heads, q_scale=q_scale, k_scale=k_scale), SMALL.pages[0])
    assert f"the norms' scales are {scales[0]} and {scales[1]}, both must be bfloat16, as heads are," in str(why)


def test_the_cache_has_the_precision_of_the_heads():
    assert "the cache float16" in str(api.why_not(SMALL.heads, SMALL.pages[0].astype(jnp.float16)))


def test_float32_scales_take_more_shared_memory():
    narrow, wide = (Case((1,), head_dim=128, wide_scales=wide_scales) for wide_scales in (False, True))
    bytes_of = [api._launch(case.heads, case.heads.qkv, case.pages[0]).shared_memory_bytes for case in (narrow, wide)]
    assert bytes_of[1] - bytes_of[0] == 2 * 128 * 2


@pytest.fixture
def nothing_told(monkeypatch):
    monkeypatch.setattr("kernels_pallas.devices._told", set())


def test_what_the_kernel_cannot_run_goes_to_the_reference_with_one_warning(nothing_told, caplog):
    backend = select_backend("pallas")
    arguments = (SMALL.heads, *SMALL.pages, SMALL.slot_mapping)
    with caplog.at_level(logging.WARNING):
        ours = [jax.jit(backend.rotate_and_write)(*arguments) for _ in range(2)]
    theirs = jax.jit(reference.rotate_and_write)(*arguments)
    for one in ours:
        assert all(
            np.array_equal(*(np.asarray(x).view(np.uint16) for x in pair)) for pair in zip(one, theirs, strict=True)
        )
    assert [record.message for record in caplog.records] == [
        "rotation and KV write run as plain XLA, not as a Mosaic GPU kernel: "
        "the device is 'cpu', the kernel is for H100, H200, H800, H20, GH200"
    ]


def test_on_a_cpu_auto_is_plain_xla_without_a_word(nothing_told, caplog):
    with caplog.at_level(logging.WARNING):
        assert select_backend("auto").rotate_and_write is reference.rotate_and_write and not caplog.records

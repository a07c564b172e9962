"""The kernel that adds and normalises: interpreted on the CPU, races found; when it runs, and when plain XLA does."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # JAX has no public name for it
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.attention import residual
from jaxinfer.attention.backend import select_backend
from kernels_pallas.add_and_norm import api, reference
from kernels_pallas.add_and_norm.mosaic_gpu import RowsLaunch
from tests.kernels.add_and_norm_cases import CASES, EPS, Case
from tests.kernels.add_and_norm_checks import AddAndNormChecks


def refuse(*_):
    raise AssertionError("the reference was asked instead of the kernel")


class TestInterpreted(AddAndNormChecks):
    def run(self, case):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        kernel = jax.jit(partial(api.add_and_norm, eps=EPS, reference=refuse, interpret=interpret))
        found = kernel(*case.arguments)
        assert not get_races().races_found
        return found


@pytest.mark.parametrize("size", [128, 192, 896, 1024, 2880, 4096, 5120, 16384])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("wide_scale", [False, True])
def test_the_kernel_takes(size, dtype, wide_scale):
    cases = (Case(size=size, parts=parts, dtype=dtype, wide_scale=wide_scale) for parts in (0, 4))
    assert all(api.why_not(*case.arguments) is None for case in cases)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(dtype=jnp.float32), "residual, result and scale are float32, float32 and float32, all must be bfloat16"),
        (Case(size=100), "the hidden size is 100, must be a multiple of 64 from 128 to 16384"),
        (Case(size=64), "the hidden size is 64, must be"),
        (Case(size=16448), "the hidden size is 16448, must be"),
    ],
)
def test_the_kernel_does_not_take(case, why):
    assert why in str(api.why_not(*case.arguments))


def test_a_scale_is_like_the_residual_or_float32():
    x, y, scale = Case().arguments
    assert "are bfloat16, bfloat16 and float16, all" in str(api.why_not(x, y, scale.astype(jnp.float16)))


@pytest.mark.parametrize("size", range(128, 1024 + 1, 64))
def test_the_pieces_of_a_row_count_each_element_once(size):
    pieces = RowsLaunch(size, 0, False, EPS, False, jnp.dtype(jnp.bfloat16)).pieces
    counted = [range(piece.start + piece.repeated, piece.start + piece.size) for piece in pieces]
    assert [index for part in counted for index in part] == list(range(size))
    assert all(piece.size % 128 == 0 for piece in pieces)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_of_the_scale_says_how_often_a_norm_is_rounded(dtype):
    x, _, scale = Case(dtype=dtype, wide_scale=True).arguments
    x32 = x.astype(jnp.float32)
    once = reference.rms_norm(x32, scale, EPS).astype(dtype)
    found = reference.rms_norm(x, scale, EPS)
    assert found.dtype == dtype and np.array_equal(np.asarray(found), np.asarray(once))

    narrow = scale.astype(dtype)
    twice = narrow * reference.rms_norm(x32, jnp.ones_like(scale), EPS).astype(dtype)
    found = reference.rms_norm(x, narrow, EPS)
    assert found.dtype == dtype and np.array_equal(np.asarray(found), np.asarray(twice))
    assert not np.array_equal(np.asarray(reference.rms_norm(x, narrow.astype(jnp.float32), EPS)), np.asarray(twice))


def test_a_wide_scale_is_applied_along_any_axis():
    x, _, scale = Case(size=64, wide_scale=True).arguments
    by_column, by_row = reference.rms_norm(x.T, scale, EPS, axis=-2).T, reference.rms_norm(x, scale, EPS)
    assert by_column.dtype == by_row.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(by_column, np.float32), np.asarray(by_row, np.float32), rtol=2**-7)


def test_what_the_kernel_cannot_run_goes_to_the_reference_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr("kernels_pallas.devices._told", set())
    arguments = CASES["four_parts"].arguments
    with caplog.at_level(logging.WARNING):
        ours = [select_backend("pallas").residual(8).add_and_norm(*arguments, EPS) for _ in range(2)]
    theirs = jax.jit(residual.add_and_norm, static_argnums=3)(*arguments, EPS)
    assert all(np.array_equal(*map(np.asarray, pair)) for one in ours for pair in zip(one, theirs, strict=True))
    assert [record.message for record in caplog.records] == [
        "residual and norm run as plain XLA, not as a Mosaic GPU kernel: "
        "the device is 'cpu', the kernel is for H100, H200, H800, H20, GH200"
    ]

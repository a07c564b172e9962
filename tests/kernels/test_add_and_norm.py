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
from kernels_pallas.add_and_norm import api
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


@pytest.mark.parametrize("size", [128, 896, 1024, 4096, 5120, 16384])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_kernel_takes(size, dtype):
    assert all(api.why_not(*Case(size=size, parts=parts, dtype=dtype).arguments) is None for parts in (0, 4))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(dtype=jnp.float32), "residual, result and scale are float32, float32 and float32, all must be bfloat16"),
        (Case(size=100), "the hidden size is 100, must be a multiple of 128 and at most 16384"),
        (Case(size=16512), "the hidden size is 16512, must be"),
    ],
)
def test_the_kernel_does_not_take(case, why):
    assert why in str(api.why_not(*case.arguments))


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

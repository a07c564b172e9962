"""The kernel that adds and normalises compiles for an H200."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from kernels_pallas.add_and_norm.api import add_and_norm
from kernels_pallas.parts import Parts
from tests.kernels.add_and_norm_cases import CASES, EPS


def refuse(*_):
    raise AssertionError("the reference was asked instead of the kernel")


def check(*arguments) -> None:
    program = compile_target(H200).compile(partial(add_and_norm, eps=EPS, reference=refuse), *arguments)
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 1


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_table_compiles(name):
    check(*CASES[name].arguments)


@pytest.mark.parametrize("size", [1024, 4096, 8192, 16384])
@pytest.mark.parametrize(("tokens", "parts"), [(2, 8), (64, 4), (8192, 0)])
def test_a_serving_shape_compiles(tokens, parts, size):
    def array(*extent: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extent, dtype)

    whole = array(tokens, size)
    cut = Parts(array(parts, tokens, size, dtype=jnp.float32), array(size), whole.dtype)  # type: ignore[arg-type]
    check(whole, cut if parts else whole, array(size))

"""The kernel that adds and normalises compiles for an H200, and its rows have room in registers."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from kernels_pallas.add_and_norm.api import add_and_norm
from kernels_pallas.parts import Parts, choose_parts
from tests.kernels.add_and_norm_cases import CASES, EPS


def refuse(*_):
    raise AssertionError("the reference was asked instead of the kernel")


def check(*arguments) -> None:
    program = compile_target(H200).compile(partial(add_and_norm, eps=EPS, reference=refuse), *arguments)
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 1


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_table_compiles(name):
    check(*CASES[name].arguments)


# Hidden sizes of families whose norms have float32 scales.
WIDE_SCALES = (2880, 5376)
# Tokens, sizes and parts. What is added is a product over as many features as the residual stream has, or over four
# times as many; often both come in the same number of parts.
SHAPES = dict.fromkeys(
    (tokens, size, choose_parts(tokens, widening * size, size, H200.num_cores))
    for tokens in (2, 64, 8192)
    for size in (1024, *WIDE_SCALES, 4096, 5120, 8192, 16384)
    for widening in (1, 4)
)


@pytest.mark.parametrize(("tokens", "size", "parts"), SHAPES)
def test_a_serving_shape_compiles_and_spills_nothing(tokens, size, parts, ptxas):
    def array(*extent: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extent, dtype)

    y = whole = array(tokens, size)
    if parts > 1:
        y = Parts(array(parts, tokens, size, dtype=jnp.float32), array(size), whole.dtype)  # type: ignore[arg-type]
    check(whole, y, array(size, dtype=jnp.float32 if size in WIDE_SCALES else jnp.bfloat16))
    [report] = ptxas()
    assert (report.kernel, report.spilled, report.serialised) == ("add_and_norm", 0, ())

"""Checks of the kernel that adds and normalises, shared by interpreted runs on a CPU and runs on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention import residual
from kernels_pallas.add_and_norm import reference
from tests.kernels.add_and_norm_cases import CASES, EPS, Case

# Of rounding: the sum of parts, with a bias, with the residual; the norm, and its product with the scale.
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3}


def check_case(case: Case, found: tuple[jax.Array, jax.Array]) -> None:
    """The sum and its norm are those of float32, row by row, but for rounding."""
    truth = residual.add_and_norm(*jax.tree.map(lambda x: x.astype(jnp.float32), case.arguments), EPS)
    for one, true in zip(found, truth, strict=True):
        assert one.dtype == case.dtype
        error = np.linalg.norm(np.asarray(one, np.float32) - np.asarray(true), axis=-1)
        assert (error / np.linalg.norm(true, axis=-1)).max() < TOLERANCE[one.dtype.name]


class AddAndNormChecks:
    """Subclasses say how a case runs; every one of them goes over the whole table."""

    def run(self, case: Case) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]
    )
    def test_the_sum_and_its_norm_are_those_of_float32(self, name):
        check_case(CASES[name], self.run(CASES[name]))

    def test_whole_results_are_rounded_as_plain_xla_rounds_them(self):
        case = CASES["whole"]
        total, _ = self.run(case)
        x, y, _ = case.arguments
        assert np.array_equal(np.asarray(total), np.asarray(x + y))

    def test_a_norm_is_rounded_after_the_product_with_a_wide_scale_alone(self):
        case = CASES["a_wide_scale"]
        x, _, scale = case.arguments
        found, once = (np.asarray(y, np.float32) for y in (self.run(case)[1], reference.rms_norm(x, scale, EPS)))
        # Some results differ in their last bit, as sums do; of two roundings, many would.
        assert np.linalg.norm(found - once) < 6e-4 * np.linalg.norm(once)

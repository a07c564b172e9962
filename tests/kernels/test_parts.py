"""Products in parts: into how many, and that their sum is the product."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.residual import PLAIN, Residual
from jaxinfer.models.layers import Projection
from kernels_pallas.parts import Parts, choose_parts, whole

NUM_CORES = 132


def chosen(rows: int, inner: int, columns: int) -> int:
    return choose_parts(rows, inner, columns, NUM_CORES)


@pytest.mark.parametrize(
    ("inner", "columns", "parts"),
    [
        (4096, 6144, 4),  # Qwen3-8B and Llama-3.1-8B: queries, keys and values
        (4096, 4096, 4),  # their output projections
        (12288, 4096, 8),  # Qwen3-8B: down
        (4096, 24576, 1),  # Qwen3-8B: gate and up
        (1024, 4096, 2),  # Qwen3-0.6B
        (8192, 57344, 1),
    ],
)
def test_few_rows_are_cut_into_as_many_parts_as_fill_the_cores(inner, columns, parts):
    assert chosen(2, inner, columns) == chosen(64, inner, columns) == parts


def test_many_rows_are_not_cut_because_their_parts_would_cost_more_than_the_matrix():
    assert [chosen(rows, 4096, 4096) for rows in (64, 128, 256, 512, 2048)] == [4, 4, 2, 1, 1]


def test_parts_divide_the_inner_dimension():
    assert chosen(2, 2 * 1031, 1024) == 2 and chosen(2, 1031, 1024) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_the_parts_of_a_projection_add_up_to_it(bias):
    projection = Projection((4, 16), (3, 5), bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0))
    if projection.bias is not None:
        projection.bias[...] = jnp.arange(15.0).reshape(3, 5)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 4, 16)), jnp.float32)
    parts = projection.in_parts(x, Residual(parts=lambda *sizes: 4 if sizes == (7, 64, 15) else 1))
    assert isinstance(parts, Parts) and parts.values.shape == (4, 7, 3, 5)
    np.testing.assert_allclose(whole(parts), projection(x), rtol=1e-5, atol=1e-5)


def test_a_projection_in_one_part_is_the_product_itself():
    projection = Projection((8,), (3,), bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 8))
    assert np.array_equal(projection.in_parts(x, PLAIN), projection(x))

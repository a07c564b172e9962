"""Grouped products against one product for each row, and the work that they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.grouped_matmul.reference import Groups, at_places, group_rows, grouped_matmul

GROUPS, INPUTS, OUTPUTS = 7, 12, 10
rng = np.random.default_rng(4)
KERNELS = rng.standard_normal((GROUPS, OUTPUTS, INPUTS)).astype(np.float32)


def by_rows(x: np.ndarray, kernels: np.ndarray, group: np.ndarray) -> np.ndarray:
    return np.stack([kernels[g] @ row for g, row in zip(group, x, strict=True)])


def product(x: jax.Array, kernels: jax.Array, group: jax.Array, copies: int, block_rows: int | None) -> jax.Array:
    groups = group_rows(group, kernels.shape[0], block_rows=block_rows)
    return grouped_matmul(at_places(x, groups, copies=copies), kernels, groups)[groups.place]


PRODUCT = jax.jit(product, static_argnums=(3, 4))


@given(st.sampled_from([1, 4, 24]), st.sampled_from([1, 2]), st.sampled_from([None, 4]), st.data())
@settings(max_examples=60)
def test_every_row_is_multiplied_with_the_kernel_of_its_group(count, copies, block_rows, data):
    """Also where all rows are of one group, and where groups have none."""
    number = count * copies
    group = np.asarray(data.draw(st.lists(st.integers(0, GROUPS - 1), min_size=number, max_size=number)), np.int32)
    x = rng.standard_normal((count, INPUTS)).astype(np.float32)
    got = PRODUCT(jnp.asarray(x), jnp.asarray(KERNELS), jnp.asarray(group), copies, block_rows)
    np.testing.assert_allclose(got, by_rows(np.repeat(x, copies, axis=0), KERNELS, group), rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(0, GROUPS - 1), min_size=30, max_size=30))
@settings(max_examples=60)
def test_a_block_has_rows_of_one_group(group):
    groups: Groups = group_rows(jnp.asarray(group, jnp.int32), GROUPS, block_rows=4)
    rows = np.asarray(groups.row).reshape(-1, 4)
    assert sorted(rows[rows < 30].tolist()) == list(range(30))
    for number, block in enumerate(rows):
        there = block[block < 30]
        assert {group[row] for row in there} <= {int(groups.group[number])}
        assert (there.size > 0) == (number < int(groups.num_blocks))
    np.testing.assert_array_equal(np.asarray(groups.row)[np.asarray(groups.place)], np.arange(30))


def test_rows_of_one_group_take_few_blocks():
    groups = group_rows(jnp.zeros(64, jnp.int32), GROUPS, block_rows=8)
    assert int(groups.num_blocks) == 8


@pytest.mark.parametrize(("count", "block_rows"), [(4, 8), (512, 8), (4096, 64), (100_000, 128)])
def test_blocks_are_as_large_as_groups_on_average(count, block_rows):
    assert group_rows(jnp.zeros(count, jnp.int32), 64).block_rows == block_rows


def test_nobody_but_rows_reads_kernels():
    """A group without rows may hold anything."""
    kernels = KERNELS.copy()
    kernels[5] = np.nan
    x = rng.standard_normal((8, INPUTS)).astype(np.float32)
    group = np.asarray([0, 1, 2, 3, 4, 6, 6, 0], np.int32)
    got = PRODUCT(jnp.asarray(x), jnp.asarray(kernels), jnp.asarray(group), 1, None)
    np.testing.assert_allclose(got, by_rows(x, KERNELS, group), rtol=1e-5, atol=1e-5)

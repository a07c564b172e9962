"""The product in plain XLA: rows sorted by group and padded to blocks, one small matrix product for each block.

`jax.lax.ragged_dot` computes every row with every group where it is not lowered to a kernel of its own: for 64 groups
and 512 rows that is eighty times the time on a CPU, and gigabytes of temporaries on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

_MOST_BLOCK_ROWS = 128
_FEWEST_BLOCK_ROWS = 8
# Of kernels that a GPU copies at once: as many as a few products take to fill it.
_CHUNK_BYTES = 256 * 2**20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Where N rows stand, sorted by group: in B blocks of `block_rows` places, each of one group."""

    place: jax.Array  # int32 [N], of each row
    row: jax.Array  # int32 [B * block_rows], which row stands at a place; N: none
    group: jax.Array  # int32 [B], of each block
    num_blocks: jax.Array  # int32 [], blocks that have rows: they come first
    block_rows: int = field(metadata={"static": True})


def group_rows(group: jax.Array, num_groups: int, *, block_rows: int | None = None) -> Groups:
    """Sort rows by their groups int32 [N], each in [0, num_groups).

    Args:
        block_rows: None: about as many as groups have rows on average.
    """
    count = group.shape[0]
    if block_rows is None:
        average = -(-count // num_groups)
        block_rows = min(max(_FEWEST_BLOCK_ROWS, 1 << (average - 1).bit_length()), _MOST_BLOCK_ROWS)
    # Every group with rows may have one block that is not full.
    blocks = min(count, count // block_rows + min(count, num_groups))
    sizes = jnp.zeros(num_groups, jnp.int32).at[group].add(1)
    blocks_of_group = -(-sizes // block_rows)
    last_block = jnp.cumsum(blocks_of_group)
    first_row = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    sorted_group = group[order]
    rank = jnp.arange(count, dtype=jnp.int32) - first_row[sorted_group]
    place_of_sorted = (last_block - blocks_of_group)[sorted_group] * block_rows + rank
    group_of_block = jnp.searchsorted(last_block, jnp.arange(blocks), side="right", method="compare_all")
    return Groups(
        place=jnp.zeros(count, jnp.int32).at[order].set(place_of_sorted),
        row=jnp.full(blocks * block_rows, count, jnp.int32).at[place_of_sorted].set(order),
        group=jnp.minimum(group_of_block, num_groups - 1).astype(jnp.int32),
        num_blocks=last_block[-1],
        block_rows=block_rows,
    )


def grouped_matmul(x: jax.Array, kernels: jax.Array, groups: Groups) -> jax.Array:
    """[P, M] of x [P, K], rows at their places, by the kernels [num_groups, M, K] of their groups; 0 at places without
    rows.

    Args:
        groups: of `group_rows`, with P places.
    """
    blocks = x.reshape(-1, groups.block_rows, x.shape[1])
    products = lax.platform_dependent(blocks, kernels, groups, cpu=_one_by_one, default=_in_chunks)
    return products.reshape(-1, kernels.shape[1])


def _one_by_one(blocks: jax.Array, kernels: jax.Array, groups: Groups) -> jax.Array:
    """A loop that reads each block's kernel where it lies, and leaves blocks without rows out."""

    def of_block(number: jax.Array) -> jax.Array:
        def product() -> jax.Array:
            kernel = lax.dynamic_index_in_dim(kernels, groups.group[number], keepdims=False)
            return jnp.einsum("ri,oi->ro", blocks[number], kernel)

        nothing = jnp.zeros((groups.block_rows, kernels.shape[1]), blocks.dtype)
        return lax.cond(number < groups.num_blocks, product, lambda: nothing)

    return lax.map(of_block, jnp.arange(blocks.shape[0]))


def _in_chunks(blocks: jax.Array, kernels: jax.Array, groups: Groups) -> jax.Array:
    """Some blocks at once, with copies of their kernels.

    A GPU would wait for the host in a loop that a conditional holds, as in programs of several steps.
    """
    of_chunk = max(1, _CHUNK_BYTES // (kernels.itemsize * kernels[0].size))
    group, products = groups.group, []
    for first in range(0, len(blocks), of_chunk):
        part = slice(first, first + of_chunk)
        products.append(jnp.einsum("bri,boi->bro", blocks[part], kernels[group[part]]))
        # One after the other, so that all copies take the same memory.
        group, products[-1] = lax.optimization_barrier((group, products[-1]))
    return jnp.concatenate(products)


def at_places(x: jax.Array, groups: Groups, *, copies: int = 1) -> jax.Array:
    """[P, K] of x [N / copies, K]: rows at their places, 0 where there is none.

    Args:
        copies: rows [i * copies, (i + 1) * copies) of the groups are all x's row i.
    """
    return jnp.take(x, groups.row // copies, axis=0, mode="fill", fill_value=0)

"""Grouped product in plain XLA: rows are sorted by group and padded to blocks, with a small product for each block.

Where `jax.lax.ragged_dot` is not lowered to a kernel, it computes every row with every group: for 64 groups and 512
rows, that takes eighty times as long on a CPU, and gigabytes of temporaries on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

_MOST_BLOCK_ROWS = 128
_FEWEST_BLOCK_ROWS = 8
# Size of the expert kernels that a GPU copies at once: enough for a few products that fill it.
_CHUNK_BYTES = 256 * 2**20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Places of N rows sorted by group, in B blocks of `block_rows` places; each block has one group."""

    place: jax.Array  # int32 [N], place of each row
    row: jax.Array  # int32 [B * block_rows], row at each place; N: none
    group: jax.Array  # int32 [B], group of each block
    num_blocks: jax.Array  # int32 [], number of blocks that have rows: they come first
    block_rows: int = field(metadata={"static": True})


def group_rows(group: jax.Array, num_groups: int, *, block_rows: int | None = None) -> Groups:
    """Sort rows by their groups int32 [N], each in [0, num_groups).

    Args:
        block_rows: places of a block; None: about the average number of rows in a group.
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
    """Multiply x [P, K], rows at their places, by the kernels [num_groups, M, K] of their groups to [P, M]; 0 at places
    without rows.

    Args:
        groups: result of `group_rows`, with P places.
    """
    blocks = x.reshape(-1, groups.block_rows, x.shape[1])
    products = lax.platform_dependent(blocks, kernels, groups, cpu=_one_by_one, default=_in_chunks)
    return products.reshape(-1, kernels.shape[1])


def _one_by_one(blocks: jax.Array, kernels: jax.Array, groups: Groups) -> jax.Array:
    """Loop over blocks; each kernel is read in place, and blocks without rows are skipped."""

    def of_block(number: jax.Array) -> jax.Array:
        def product() -> jax.Array:
            kernel = lax.dynamic_index_in_dim(kernels, groups.group[number], keepdims=False)
            return jnp.einsum("ri,oi->ro", blocks[number], kernel)

        nothing = jnp.zeros((groups.block_rows, kernels.shape[1]), blocks.dtype)
        return lax.cond(number < groups.num_blocks, product, lambda: nothing)

    return lax.map(of_block, jnp.arange(blocks.shape[0]))


def _in_chunks(blocks: jax.Array, kernels: jax.Array, groups: Groups) -> jax.Array:
    """Multiply some blocks at once, with copies of their kernels, in an unrolled loop.

    A GPU would wait for the host in a real loop inside a conditional, as in programs of several steps.
    """
    of_chunk = max(1, _CHUNK_BYTES // (kernels.itemsize * kernels[0].size))
    group, products = groups.group, []
    for first in range(0, len(blocks), of_chunk):
        part = slice(first, first + of_chunk)
        products.append(jnp.einsum("bri,boi->bro", blocks[part], kernels[group[part]]))
        # In sequence, so that all copies use the same memory.
        group, products[-1] = lax.optimization_barrier((group, products[-1]))
    return jnp.concatenate(products)


def at_places(x: jax.Array, groups: Groups, *, copies: int = 1) -> jax.Array:
    """Move rows of x [N / copies, K] to their places [P, K]; 0 at places without rows.

    Args:
        copies: rows [i * copies, (i + 1) * copies) of the groups are all x's row i.
    """
    return jnp.take(x, groups.row // copies, axis=0, mode="fill", fill_value=0)

"""Inside the kernel: the work items of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.branch_attention.blocks import HEADER
from kernels_pallas.branch_attention.tuning import KernelLaunch


@dataclass(frozen=True)
class Item:
    """A program's work between two stores."""

    block: jax.Array
    split: jax.Array
    head: jax.Array
    begin: jax.Array  # range in the block's list of tiles
    end: jax.Array
    step: jax.Array  # tiles that the program processed before this item

    def stage(self, tile: jax.Array, stages: int) -> jax.Array:
        """The stage of a tile in the ring buffer."""
        return lax.rem(self.step + tile - self.begin, jnp.int32(stages))


def item_of(launch: KernelLaunch, memory: Any, index: jax.Array, step: jax.Array) -> Item:
    """Return item `index` of the launch, for a program that has processed `step` tiles."""
    # The heads of a block follow each other: they read the same pages' rows, and their programs run together.
    rest, head = lax.div(index, jnp.int32(launch.kv_heads)), lax.rem(index, jnp.int32(launch.kv_heads))
    splits = jnp.int32(launch.tuning.splits)
    # The last blocks of a prefill see the most pages: the longest work goes first.
    blocks = launch.items // (launch.kv_heads * launch.tuning.splits)
    block, split = blocks - 1 - lax.div(rest, splits), lax.rem(rest, splits)
    tiles = memory.header[block, HEADER.index("tiles")]
    share = lax.div(tiles + splits - 1, splits)
    begin = jnp.minimum(split * share, tiles)
    return Item(block, split, head, begin, jnp.minimum(begin + share, tiles), step)

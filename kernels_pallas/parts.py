"""Matrix products in parts: sums over the inner dimension that are not added up yet.

Few rows times a wide matrix give a GPU too few tiles to keep all its cores reading. Cut along the inner dimension there
are more of them, and the parts have to be added. XLA does so by itself, with one more kernel for the sum; a kernel that
reads the product anyway can add the parts while it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

# Columns of the product that one program computes; what XLA assumes too.
_TILE_COLUMNS = 128
# A shorter inner dimension is all overhead.
MIN_INNER = 512
# Below so many tiles a core, XLA cuts by itself what is longer.
ENOUGH_TILES, MAX_INNER = 1.25, 1536


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """A product [...] of precision `dtype` as float32 parts [S, ...] whose sum it is, and a bias still to be added."""

    values: jax.Array
    bias: jax.Array | None  # of the trailing axes
    dtype: jnp.dtype = field(metadata={"static": True})

    def __len__(self) -> int:
        return self.values.shape[0]


def whole(product: jax.Array | Parts) -> jax.Array:
    """The product itself, its parts added in float32 and its bias in its own precision."""
    if not isinstance(product, Parts):
        return product
    total = jnp.sum(product.values, axis=0).astype(product.dtype)
    return total if product.bias is None else total + product.bias


def choose_parts(rows: int, inner: int, columns: int, num_cores: int) -> int:
    """Into how many parts to cut the product of [rows, inner] and [inner, columns] 16-bit numbers.

    As few as fill the cores, and none where writing and reading the parts would cost more than half of what reading
    the matrix costs.
    """
    tiles = -(-columns // _TILE_COLUMNS)
    parts = 1
    while inner % (2 * parts) == 0 and inner // (2 * parts) >= MIN_INNER and 8 * rows * 2 * parts <= inner:
        filled = parts * tiles / num_cores
        if filled >= ENOUGH_TILES or (filled >= 0.75 and inner // parts <= MAX_INNER):
            break
        parts *= 2
    return parts

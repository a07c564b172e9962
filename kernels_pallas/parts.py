"""Matrix products in parts: sums over the inner dimension that are not added up yet.

The product of few rows and a wide matrix has too few tiles to keep all of a GPU's cores reading. Cutting it along the
inner dimension (split-K) gives more tiles, whose results must be added. XLA does so by itself, with one more kernel for
the sum; a kernel that reads the product anyway can add the parts as it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

# Columns of the product that one program computes, as in XLA's own heuristic.
_TILE_COLUMNS = 128
# With a shorter inner dimension, overhead dominates.
MIN_INNER = 512
# With fewer tiles per core than this, XLA itself cuts an inner dimension above `MAX_INNER`.
ENOUGH_TILES, MAX_INNER = 1.25, 1536


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """A product [...] of dtype `dtype` as float32 parts [S, ...] to be summed, and a bias to be added to the sum."""

    values: jax.Array
    bias: jax.Array | None  # bias over the trailing axes
    dtype: jnp.dtype = field(metadata={"static": True})

    def __len__(self) -> int:
        return self.values.shape[0]


def whole(product: jax.Array | Parts) -> jax.Array:
    """Return the product; parts are summed in float32, the bias is added in the product's dtype."""
    if not isinstance(product, Parts):
        return product
    total = jnp.sum(product.values, axis=0).astype(product.dtype)
    return total if product.bias is None else total + product.bias


def choose_parts(rows: int, inner: int, columns: int, num_cores: int) -> int:
    """Return the number of parts into which to cut the product of [rows, inner] and [inner, columns] 16-bit numbers.

    It is the least that fills the cores, as long as writing and reading the parts costs at most half of reading the
    matrix.
    """
    tiles = -(-columns // _TILE_COLUMNS)
    parts = 1
    while inner % (2 * parts) == 0 and inner // (2 * parts) >= MIN_INNER and 8 * rows * 2 * parts <= inner:
        filled = parts * tiles / num_cores
        if filled >= ENOUGH_TILES or (filled >= 0.75 and inner // parts <= MAX_INNER):
            break
        parts *= 2
    return parts

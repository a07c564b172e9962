"""A digest of weights, computed where they are: equal for equal values, however they are spread over devices.

Heads that are replicated over devices are values of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.programs.weights import ModelWeights

_SEEDS = (0x9E3779B9, 0x7F4A7C15, 0xBF58476D, 0x94D049BB)


def digest_of(weights: ModelWeights) -> str:
    """Return 64 hexadecimal digits, by path, shape, type, place and bits of every value.

    Each value of a leaf is mixed with its place, and the mixed values are added: a sum needs no order, and each device
    adds up its own share.
    """
    sums = [_sums(leaf) for leaf in weights.leaves]  # all are launched before the first one is read
    found = hashlib.sha256()
    for path, leaf, of_leaf in sorted(zip(weights.paths, weights.leaves, sums, strict=True), key=lambda each: each[0]):
        found.update(f"{path} {leaf.dtype} {list(leaf.shape)} {np.asarray(of_leaf).tolist()}\n".encode())
    return found.hexdigest()


@jax.jit
def _sums(leaf: jax.Array) -> jax.Array:
    """Return uint32 [4]."""
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    bits = lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    place = _places(leaf.shape)
    return jnp.stack([jnp.sum(_mixed(bits ^ _mixed(place + jnp.uint32(seed))), dtype=jnp.uint32) for seed in _SEEDS])


def _places(shape: Sequence[int]) -> jax.Array:
    """Number of each value in the order of rows, uint32 of this shape; beyond 2**32 they repeat."""
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return place


def _mixed(x: jax.Array) -> jax.Array:
    """Spread every bit over all others (the last steps of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

"""Host arrays that cross to the device as one int32 buffer: views to fill, and what they are there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Layout = Mapping[str, tuple[tuple[int, ...], Any]]  # name -> (shape, dtype of four bytes), in the buffer's order


class Packed:
    """Arrays of zeros, as views into one buffer: fill the views, then send the buffer."""

    def __init__(self, layout: Layout) -> None:
        self.buffer = np.zeros(sum(math.prod(extent) for extent, _ in layout.values()), np.int32)
        self.views: dict[str, np.ndarray] = {
            name: self.buffer[place].view(dtype).reshape(extent) for name, place, extent, dtype in _places(layout)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.views[name]


def unpacked(buffer: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    """The inverse of `Packed`, inside a jitted function: slices and bit casts of one buffer."""
    values: dict[str, jax.Array] = {}
    for name, place, extent, dtype in _places(layout):
        flat = buffer[place]
        if dtype is not np.int32:
            flat = lax.bitcast_convert_type(flat, jnp.dtype(dtype))
        values[name] = flat.reshape(extent)
    return values


def _places(layout: Layout) -> Iterator[tuple[str, slice, tuple[int, ...], Any]]:
    start = 0
    for name, (extent, dtype) in layout.items():
        size = math.prod(extent)
        yield name, slice(start, start + size), extent, dtype
        start += size

"""Host arrays that cross to the device as one int32 buffer: views to fill, and what they are there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Extent = tuple[tuple[int, ...], Any]  # shape, and dtype of four bytes


class Layout(dict[str, Extent]):
    """Name -> extent of every array, in the buffer's order. Shapes keep theirs: it is asked for in every launch.

    Attributes:
        size: elements of the buffer.
        places: name, place in the buffer, shape and dtype of each array.
    """

    def __init__(self, extents: Mapping[str, Extent]) -> None:
        super().__init__(extents)
        self.places: list[tuple[str, slice, tuple[int, ...], Any]] = []
        self.size = 0
        for name, (extent, dtype) in extents.items():
            end = self.size + math.prod(extent)
            self.places.append((name, slice(self.size, end), extent, dtype))
            self.size = end


class Packed:
    """Arrays of zeros, as views into one buffer: fill the views, then send the buffer."""

    def __init__(self, layout: Layout) -> None:
        self.buffer = np.zeros(layout.size, np.int32)
        self.views: dict[str, np.ndarray] = {
            name: self.buffer[place].view(dtype).reshape(extent) for name, place, extent, dtype in layout.places
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.views[name]


def unpacked(buffer: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    """The inverse of `Packed`, inside a jitted function: slices and bit casts of one buffer."""
    values: dict[str, jax.Array] = {}
    for name, place, extent, dtype in layout.places:
        flat = buffer[place]
        if dtype is not np.int32:
            flat = lax.bitcast_convert_type(flat, jnp.dtype(dtype))
        values[name] = flat.reshape(extent)
    return values

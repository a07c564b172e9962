"""Host arrays that cross to the device as one int32 buffer: views to fill on the host, arrays on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Extent = tuple[tuple[int, ...], Any]  # shape, and dtype of four bytes


class Shape(Protocol):
    """Key of a layout of packed arrays; equal shapes have equal layouts."""

    def layout(self) -> Mapping[str, Extent]: ...

    def __hash__(self) -> int: ...


class PackedLayout(NamedTuple):
    """Places of arrays in a buffer.

    Attributes:
        size: elements of the buffer.
        places: name, place in the buffer, shape and dtype of each array.
    """

    size: int
    places: tuple[tuple[str, slice, tuple[int, ...], Any], ...]


@functools.cache  # called in every launch; there are few shapes
def layout_of(shape: Shape) -> PackedLayout:
    places, size = [], 0
    for name, (extent, dtype) in shape.layout().items():
        end = size + math.prod(extent)
        places.append((name, slice(size, end), extent, dtype))
        size = end
    return PackedLayout(size, tuple(places))


class Packed:
    """Arrays of zeros, as views into one buffer: fill the views, then send the buffer."""

    def __init__(self, shape: Shape) -> None:
        layout = layout_of(shape)
        self.buffer = np.zeros(layout.size, np.int32)
        self.views: dict[str, np.ndarray] = {
            name: self.buffer[place].view(dtype).reshape(extent) for name, place, extent, dtype in layout.places
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.views[name]


def unpacked(buffer: jax.Array, shape: Shape) -> dict[str, jax.Array]:
    """Return the arrays in a buffer of `Packed`, inside a jitted function: slices and bit casts of the buffer."""
    values: dict[str, jax.Array] = {}
    for name, place, extent, dtype in layout_of(shape).places:
        flat = buffer[place]
        if dtype is not np.int32:
            flat = lax.bitcast_convert_type(flat, jnp.dtype(dtype))
        values[name] = flat.reshape(extent)
    return values

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
        places: by name, place in the buffer, shape and dtype of each array.
    """

    size: int
    places: Mapping[str, tuple[slice, tuple[int, ...], Any]]


@functools.cache  # called in every launch; there are few shapes
def layout_of(shape: Shape) -> PackedLayout:
    places, size = dict[str, tuple[slice, tuple[int, ...], Any]](), 0
    for name, (extent, dtype) in shape.layout().items():
        end = size + math.prod(extent)
        places[name] = slice(size, end), extent, dtype
        size = end
    return PackedLayout(size, places)


class Packed:
    """Arrays as views into one buffer: fill the views, then send the buffer.

    Args:
        buffer: int32, of arrays of this shape; None: they are zeros.
    """

    def __init__(self, shape: Shape, buffer: np.ndarray | None = None) -> None:
        layout = layout_of(shape)
        self.buffer = np.zeros(layout.size, np.int32) if buffer is None else buffer
        self._places = layout.places
        self._views: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        view = self._views.get(name)
        if view is None:  # made when it is asked for: most launches change few arrays
            place, extent, dtype = self._places[name]
            view = self._views[name] = self.buffer[place].view(dtype).reshape(extent)
        return view


def unpacked(buffer: jax.Array, shape: Shape) -> dict[str, jax.Array]:
    """Return the arrays in a buffer of `Packed`, inside a jitted function: slices and bit casts of the buffer."""
    values: dict[str, jax.Array] = {}
    for name, (place, extent, dtype) in layout_of(shape).places.items():
        flat = buffer[place]
        if dtype is not np.int32:
            flat = lax.bitcast_convert_type(flat, jnp.dtype(dtype))
        values[name] = flat.reshape(extent)
    return values

"""Sequences enter their seats from the host: their latest token, their length, and what their draws are bound to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.programs.program import BOUNDS, SEATS, Device, Place
from jaxinfer.programs.seats import Seats
from jaxinfer.sampling.bounds import Bounds

# So many of each in a launch: an entry of a vocabulary of 152k words takes 60 kB, and a count 12 bytes.
SEATS_OF_ENTRY, COUNTS_OF_ENTRY = 4, 4096


class EntryShape(NamedTuple):
    """N seats, C counts of all of them, and a vocabulary."""

    num_seats: int
    num_counts: int
    vocab: int

    def layout(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Name -> (shape, dtype) of every host array, in the order of the packed buffer."""
        i, n, c = np.int32, self.num_seats, self.num_counts
        bounds = Bounds.layout(n, self.vocab)
        del bounds["counts"]
        return {
            # Out of range: nobody enters. Where only counts are added, everything else stays as it is in the seat.
            "seat": ((n,), i), "adds_counts": ((n,), i),
            "token": ((n,), i), "length": ((n,), i),  # 0: the seat's token and length are written by a step
            **bounds,
            "count_of": ((c,), i), "count_token": ((c,), i), "count": ((c,), i),  # N: none
        }  # fmt: skip


class PackedEntry:
    """Host arrays of a launch that enters nobody, as views into one int32 buffer: fill them, then send the buffer."""

    def __init__(self, shape: EntryShape, num_seats: int) -> None:
        layout = shape.layout()
        self.buffer = np.zeros(sum(math.prod(extent) for extent, _ in layout.values()), np.int32)
        self.views: dict[str, np.ndarray] = {}
        start = 0
        for name, (extent, dtype) in layout.items():
            size = math.prod(extent)
            self.views[name] = self.buffer[start : start + size].view(dtype).reshape(extent)
            start += size
        self["seat"][:], self["count_of"][:] = num_seats, shape.num_seats

    def __getitem__(self, name: str) -> np.ndarray:
        return self.views[name]


@dataclass(frozen=True, eq=False)
class Entry:
    """The program by which sequences enter their seats, all of one size: it runs again for what does not fit."""

    shapes: Sequence[EntryShape] = ()
    reads = ()
    writes = (SEATS, BOUNDS)

    @property
    def planned(self) -> dict[str, EntryShape]:
        return {"entry": max(self.shapes)}

    def describe(self, shape: EntryShape) -> str:
        return f"entry of {shape.num_seats} sequences"

    def idle(self, shape: EntryShape, place: Place) -> tuple[Any, ...]:
        return (PackedEntry(shape, place.num_seats).buffer,)

    def run(self, device: Device, shape: EntryShape, buffer: jax.Array) -> tuple[dict[str, Any], None]:
        """The seats and bounds."""
        given = _unpacked(buffer, shape)
        seats, bounds = device.state[SEATS], device.state[BOUNDS]
        num_seats = seats.token.shape[0]
        seat = given.pop("seat")
        enters = jnp.where(given.pop("adds_counts") > 0, num_seats, seat)
        length = given.pop("length")
        placed = jnp.where(length > 0, enters, num_seats)
        seats = Seats(
            token=seats.token.at[placed].set(given.pop("token"), mode="drop"),
            length=seats.length.at[placed].set(length, mode="drop"),
        )
        count_of, token, count = (given.pop(name) for name in ("count_of", "count_token", "count"))
        counts = bounds.counts.at[enters].set(0, mode="drop")
        at = jnp.append(seat, num_seats).at[count_of].get(mode="clip")
        counts = counts.at[at, token].set(count.astype(counts.dtype), mode="drop")
        others = {name: getattr(bounds, name).at[enters].set(new, mode="drop") for name, new in given.items()}
        return {SEATS: seats, BOUNDS: Bounds(counts=counts, **others)}, None


def _unpacked(buffer: jax.Array, shape: EntryShape) -> dict[str, jax.Array]:
    values: dict[str, jax.Array] = {}
    start = 0
    for name, (extent, dtype) in shape.layout().items():
        flat = buffer[start : start + math.prod(extent)]
        start += math.prod(extent)
        values[name] = (flat if dtype is np.int32 else lax.bitcast_convert_type(flat, jnp.dtype(dtype))).reshape(extent)
    return values

"""Sequences enter their seats from the host: their latest token, their length, and what their draws are bound to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.programs.packing import Extent, Packed, unpacked
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

    def layout(self) -> dict[str, Extent]:
        """Name -> (shape, dtype) of every host array, in the order of the packed buffer."""
        i, n, c = np.int32, self.num_seats, self.num_counts
        bounds = Bounds.layout(n, self.vocab)
        del bounds["counts"]
        return {
            # Out of range: nothing enters. Where only counts are added, everything else stays as it is in the seat.
            "seat": ((n,), i), "adds_counts": ((n,), i),
            "token": ((n,), i), "length": ((n,), i),  # 0: the seat's token and length are written by a step
            **bounds,
            "count_of": ((c,), i), "count_token": ((c,), i), "count": ((c,), i),  # N: none
        }  # fmt: skip


class PackedEntry(Packed):
    """Host arrays of a launch in which nothing enters a seat, to be filled in."""

    def __init__(self, shape: EntryShape, num_seats: int) -> None:
        super().__init__(shape)
        self["seat"][:], self["count_of"][:] = num_seats, shape.num_seats


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
        given = unpacked(buffer, shape)
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

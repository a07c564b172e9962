"""Entry of sequences into their seats from the host: latest tokens, length, and the bounds of their draws."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.programs.packing import Extent, Packed, unpacked
from jaxinfer.programs.program import BOUNDS, SEATS, Device, Place
from jaxinfer.programs.seats import Seats
from jaxinfer.sampling.bounds import Bounds

# Seats and counts of a launch: an entry with a vocabulary of 152k words takes 60 kB, and a count 12 bytes.
SEATS_OF_ENTRY, COUNTS_OF_ENTRY = 4, 4096
# Where only tokens enter, an entry takes 20 bytes.
SEATS_OF_TOKENS = 64


class Enters(enum.IntEnum):
    """Parts of an entry that a seat takes over; all else stays as it is."""

    ALL = 0  # bounds, with no counts but those given, and tokens where there is a length
    COUNTS = 1  # further counts, besides those of an earlier entry
    MASK = 2  # the mask of the next draw
    TOKENS = 3  # the latest tokens and the length


class EntryShape(NamedTuple):
    """Sizes of an entry: N seats, C counts of all of them, and a vocabulary; a vocabulary of 0: only tokens enter."""

    num_seats: int
    num_counts: int
    vocab: int

    @classmethod
    def all_of(cls, num_seats: int, vocab: int) -> tuple[EntryShape, EntryShape]:
        """Return the shapes of an engine: for whole entries, and for tokens alone."""
        return cls(SEATS_OF_ENTRY, COUNTS_OF_ENTRY, vocab), cls(min(SEATS_OF_TOKENS, num_seats), 0, 0)

    def layout(self) -> dict[str, Extent]:
        """Return name -> (shape, dtype) of every host array, in the order of the packed buffer."""
        i, n, c = np.int32, self.num_seats, self.num_counts
        bounds = Bounds.layout(n, self.vocab) if self.vocab else {}
        bounds.pop("counts", None)
        return {
            "seat": ((n,), i),  # out of range: nothing enters
            "enters": ((n,), i),  # `Enters`
            "token": ((n,), i), "before": ((n,), i),
            "length": ((n,), i),  # 0: the seat's tokens and length are written by a step
            **bounds,
            "count_of": ((c,), i), "count_token": ((c,), i), "count": ((c,), i),  # N: none
        }  # fmt: skip


class PackedEntry(Packed):
    """Host arrays of a launch in which nothing enters a seat, to be filled in."""

    def __init__(self, shape: EntryShape, num_seats: int) -> None:
        super().__init__(shape)
        self.shape = shape
        self["seat"][:], self["count_of"][:] = num_seats, shape.num_seats


@dataclass(frozen=True, eq=False)
class Entry:
    """Program by which sequences enter their seats. It has few sizes, and runs again for what does not fit."""

    shapes: Sequence[EntryShape] = ()
    reads = ()
    writes = (SEATS, BOUNDS)

    @property
    def planned(self) -> dict[str, EntryShape]:
        return {"entry": max(self.shapes, key=lambda shape: shape.vocab)}

    def describe(self, shape: EntryShape) -> str:
        return f"entry of {shape.num_seats} sequences{'' if shape.vocab else ', of their tokens alone'}"

    def idle(self, shape: EntryShape, place: Place) -> tuple[Any, ...]:
        return (PackedEntry(shape, place.num_seats).buffer,)

    def run(self, device: Device, shape: EntryShape, buffer: jax.Array) -> tuple[dict[str, Any], None]:
        """Return the seats and bounds."""
        given = unpacked(buffer, shape)
        seats, bounds = device.state[SEATS], device.state[BOUNDS]
        nowhere = seats.token.shape[0]
        seat, enters, length = (given.pop(name) for name in ("seat", "enters", "length"))

        def seats_that(*what: Enters) -> jax.Array:
            takes = jnp.any(jnp.stack([enters == one for one in what]), axis=0)
            return jnp.where(takes, seat, nowhere)

        placed = jnp.where(length > 0, seats_that(Enters.ALL, Enters.TOKENS), nowhere)
        seats = Seats(
            token=seats.token.at[placed].set(given.pop("token"), mode="drop"),
            before=seats.before.at[placed].set(given.pop("before"), mode="drop"),
            length=seats.length.at[placed].set(length, mode="drop"),
        )
        count_of, token, count = (given.pop(name) for name in ("count_of", "count_token", "count"))
        if shape.vocab:
            all_of = seats_that(Enters.ALL)
            counts = bounds.counts.at[all_of].set(0, mode="drop")
            at = jnp.append(seat, nowhere).at[count_of].get(mode="clip")
            counts = counts.at[at, token].set(count.astype(counts.dtype), mode="drop")
            places = {name: seats_that(Enters.ALL, Enters.MASK) for name in ("masked_at", "masks_list", "mask")}
            others = {
                name: getattr(bounds, name).at[places.get(name, all_of)].set(new, mode="drop")
                for name, new in given.items()
            }
            bounds = replace(bounds, counts=counts, **others)
        return {SEATS: seats, BOUNDS: device.placed(bounds)}, None

"""Entry of sequences into their seats from the host: latest tokens, length, and the bounds of their draws."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
# Where only masks enter, which is before every draw of rows whose guards refuse much, an entry with such a vocabulary
# takes 19 kB; where only tokens enter, 20 bytes.
SEATS_OF_MASKS, SEATS_OF_TOKENS = 16, 64


class Enters(enum.IntEnum):
    """Parts of a seat that an entry writes; all else stays as it is."""

    ALL = 0  # bounds, with no counts but those given, and tokens where there is a length
    COUNTS = 1  # further counts, besides those of an earlier entry
    MASK = 2  # the mask of the next draw
    TOKENS = 3  # the latest tokens and the length


# The bounds that are a mask of the next draw.
OF_MASK = ("masked_at", "masks_list", "mask")


class EntryShape(NamedTuple):
    """Sizes of an entry: N seats, C counts of all of them, and a vocabulary; and what it has room for."""

    num_seats: int
    num_counts: int
    vocab: int
    holds: Enters = Enters.ALL

    @classmethod
    def all_of(cls, num_seats: int, vocab: int) -> dict[Enters, EntryShape]:
        """Return the shapes of an engine: for whole entries, for masks alone, and for tokens alone."""
        masks, tokens = min(SEATS_OF_MASKS, num_seats), min(SEATS_OF_TOKENS, num_seats)
        return {
            Enters.ALL: cls(SEATS_OF_ENTRY, COUNTS_OF_ENTRY, vocab),
            Enters.MASK: cls(masks, 0, vocab, Enters.MASK),
            Enters.TOKENS: cls(tokens, 0, 0, Enters.TOKENS),
        }

    def layout(self) -> dict[str, Extent]:
        """Return name -> (shape, dtype) of every host array, in the order of the packed buffer."""
        i, n, c = np.int32, self.num_seats, self.num_counts
        seats = {"seat": ((n,), i)}  # out of range: nothing enters
        bounds = Bounds.layout(n, self.vocab) if self.vocab else {}
        if self.holds is Enters.MASK:
            return {**seats, **{name: bounds[name] for name in OF_MASK}}
        tokens = {
            "token": ((n,), i), "before": ((n,), i),
            "length": ((n,), i),  # 0: the seat's tokens and length are written by a step
        }  # fmt: skip
        if self.holds is Enters.TOKENS:
            return {**seats, **tokens}
        del bounds["counts"]
        return {
            **seats,
            "enters": ((n,), i),  # `Enters.ALL` or `Enters.COUNTS`
            **tokens, **bounds,
            "count_of": ((c,), i), "count_token": ((c,), i), "count": ((c,), i),  # N: none
        }  # fmt: skip


class PackedEntry(Packed):
    """Host arrays of a launch in which nothing enters a seat, to be filled in."""

    def __init__(self, shape: EntryShape, num_seats: int) -> None:
        super().__init__(shape)
        self.shape = shape
        self["seat"][:] = num_seats
        if shape.num_counts:
            self["count_of"][:] = shape.num_seats


@dataclass(frozen=True, eq=False)
class Entry:
    """Program by which sequences enter their seats. It runs again for what does not fit.

    Attributes:
        shapes: the shape for what an entry holds: `ALL` (with `COUNTS`), `MASK` and `TOKENS`.
    """

    shape_of: Mapping[Enters, EntryShape] = field(default_factory=dict)
    reads = ()
    writes = (SEATS, BOUNDS)

    @property
    def shapes(self) -> Sequence[EntryShape]:
        return tuple(self.shape_of.values())

    @property
    def planned(self) -> dict[str, EntryShape]:
        return {"entry": self.shape_of[Enters.ALL]}

    def describe(self, shape: EntryShape) -> str:
        alone = {Enters.MASK: ", of their masks alone", Enters.TOKENS: ", of their tokens alone"}
        return f"entry of {shape.num_seats} sequences{alone.get(shape.holds, '')}"

    def idle(self, shape: EntryShape, place: Place) -> tuple[Any, ...]:
        return (PackedEntry(shape, place.num_seats).buffer,)

    def run(self, device: Device, shape: EntryShape, buffer: jax.Array) -> tuple[dict[str, Any], None]:
        """Return the seats and bounds."""
        given = unpacked(buffer, shape)
        seats, bounds = device.state[SEATS], device.state[BOUNDS]
        seat = given.pop("seat")
        if shape.holds is Enters.ALL:
            bounds, seat = _with_counts(bounds, seat, given)
        if shape.holds is not Enters.MASK:
            seats = _with_tokens(seats, seat, given)
        if shape.holds is not Enters.TOKENS:
            arrays = {name: getattr(bounds, name).at[seat].set(new, mode="drop") for name, new in given.items()}
            bounds = device.placed(replace(bounds, **arrays))
        return {SEATS: seats, BOUNDS: bounds}, None


def _with_tokens(seats: Seats, seat: jax.Array, given: dict[str, jax.Array]) -> Seats:
    """Return the seats with the tokens of those that have a length; takes these arrays out of `given`."""
    token, before, length = (given.pop(name) for name in ("token", "before", "length"))
    placed = jnp.where(length > 0, seat, seats.token.shape[0])
    return Seats(
        token=seats.token.at[placed].set(token, mode="drop"),
        before=seats.before.at[placed].set(before, mode="drop"),
        length=seats.length.at[placed].set(length, mode="drop"),
    )


def _with_counts(bounds: Bounds, seat: jax.Array, given: dict[str, jax.Array]) -> tuple[Bounds, jax.Array]:
    """Return the bounds with the counts of seats, and the seats int32 [N] that take over all else, too; takes the
    arrays of counts out of `given`."""
    enters, count_of, token, count = (given.pop(name) for name in ("enters", "count_of", "count_token", "count"))
    nowhere = bounds.counts.shape[0]
    all_of = jnp.where(enters == Enters.ALL, seat, nowhere)
    counts = bounds.counts.at[all_of].set(0, mode="drop")
    at = jnp.append(seat, nowhere).at[count_of].get(mode="clip")
    return replace(bounds, counts=counts.at[at, token].set(count.astype(counts.dtype), mode="drop")), all_of

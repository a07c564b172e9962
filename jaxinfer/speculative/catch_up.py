"""A drafter takes in tokens that the target computed without it: a prefix found in the cache, a time without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.programs.batch_layout import BatchShape, idle_batch, unpack
from jaxinfer.programs.program import Device, Place
from jaxinfer.programs.step import Follower


@dataclass(frozen=True, eq=False)
class CatchUp:
    """The program; its input is a packed batch of chunks of known tokens."""

    follower: Follower
    shapes: Sequence[BatchShape] = ()

    @property
    def reads(self) -> Sequence[str]:
        return self.follower.reads

    @property
    def writes(self) -> Sequence[str]:
        return self.follower.writes

    @property
    def planned(self) -> dict[str, BatchShape]:
        return {"drafter_catch_up": max(self.shapes, key=lambda shape: (shape.num_tokens, shape.pages_per_row))}

    def describe(self, shape: BatchShape) -> str:
        return f"drafter catches up on {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], tuple[()]]:
        return self.follower.follow(device, unpack(buffer, shape)), ()

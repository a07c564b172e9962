"""Catching up: a drafter takes in tokens that the target computed without it, cached or while nothing was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.batch_layout import BatchShape, idle_batch, unpack
from jaxinfer.programs.forward import forward_with_features
from jaxinfer.programs.program import KV, TARGET, Device, Place
from jaxinfer.programs.step import Follower


@dataclass(frozen=True, eq=False)
class CatchUp:
    """The catch-up program, whose input is a packed batch of chunks of known tokens."""

    follower: Follower
    shapes: Sequence[BatchShape] = ()

    @property
    def reads(self) -> Sequence[str]:
        return self.follower.reads if not self.follower.capture else (TARGET, *self.follower.reads)

    @property
    def writes(self) -> Sequence[str]:
        return self.follower.writes if not self.follower.capture else (KV, *self.follower.writes)

    @property
    def planned(self) -> dict[str, BatchShape]:
        return {"drafter_catch_up": max(self.shapes, key=lambda shape: (shape.num_tokens, shape.pages_per_row))}

    def describe(self, shape: BatchShape) -> str:
        return f"drafter catches up on {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], tuple[()]]:
        batch = unpack(buffer, shape)
        if not self.follower.capture:
            return self.follower.follow(device, batch, None), ()
        # The drafter needs features that exist only while the target computes. The target's KV is there already, so
        # it is not written again.
        kv: KVPool = device.state[KV]
        nowhere = kv.num_slots + jnp.arange(shape.num_tokens)
        computed = replace(batch, slot_mapping=nowhere)
        kv, _, features = forward_with_features(
            device.models[TARGET], kv, computed, device.backend, self.follower.capture
        )
        return {KV: kv, **self.follower.follow(device, batch, features, again=True)}, ()

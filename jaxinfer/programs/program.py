"""Protocol of programs: pure functions of the device's state and some inputs, compiled once for each shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.bounds import Bounds, BoundsPlace

# Parts of the device's state, and models, by name. A strategy adds its own.
TARGET, KV, SEATS = "target", "kv", "seats"
BOUNDS = "bounds"  # bounds of draws, by seat


@dataclass(frozen=True)
class Device:
    """Arguments of a program while it is traced: the models and parts of the state that it names, and where it runs.

    `state` has the parts as they are before the program, which returns the changed ones.
    """

    models: Mapping[str, Any]
    state: Mapping[str, Any]
    backend: AttentionBackend
    mesh: Mesh | None

    def readable(self, tree: Any) -> Any:
        """Return arrays for the host or for a later program: replicated on every device."""
        everywhere = everywhere_on(self.mesh)
        return tree if everywhere is None else lax.with_sharding_constraint(tree, everywhere)

    def split_by_word(self, logits: jax.Array) -> jax.Array:
        """Return logits [Q, vocab] for a later program: each device keeps those of its own words."""
        sharding = sharding_of_logits(self.mesh, logits.shape[-1])
        return logits if sharding is None else lax.with_sharding_constraint(logits, sharding)

    def placed(self, bounds: Bounds) -> Bounds:
        """Return the bounds with the shardings of `bounds_place`: replicated, but for the counts."""
        return replace(self.readable(replace(bounds, counts=())), counts=self.split_by_word(bounds.counts))


class Program(Protocol):
    """A function of models, of parts of the device's state that it changes in place, and of inputs.

    The runner compiles it for a shape at its first launch with that shape; `shapes` are those that an engine can need.
    `planned` are the shapes that a plan looks at, the largest of their kind, each under the name that the plan shows.
    """

    @property
    def reads(self) -> Sequence[str]: ...  # names of models

    @property
    def writes(self) -> Sequence[str]: ...  # names of parts of the state, which it is given to change

    @property
    def shapes(self) -> Sequence[Hashable]: ...

    @property
    def planned(self) -> Mapping[str, Hashable]: ...

    def describe(self, shape: Any) -> str:
        """Return the program with that shape in words, for logs and progress lines."""
        ...

    def idle(self, shape: Any, place: Place) -> tuple[Any, ...]:
        """Return inputs of that shape that do nothing: arrays where a host sends them, `jax.ShapeDtypeStruct` where
        another program has left them on the device."""
        ...

    @property
    def run(self) -> Callable[..., tuple[dict[str, Any], Any]]:
        """(device, shape, *inputs) -> the parts of the state that it `writes`, and its results."""
        ...


@dataclass(frozen=True)
class Place:
    """State sizes and shardings, which inputs depend on besides their shape. What a program left on devices is
    replicated (`whole`) or split by words. None: it is on the default device."""

    num_slots: int
    num_seats: int
    model: DecoderLM
    whole: jax.sharding.Sharding | None
    split_by_word: jax.sharding.Sharding | None


def everywhere_on(mesh: Mesh | None) -> NamedSharding | None:
    """Return the sharding that replicates on every device of a mesh; None: there is no mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def sharding_of_logits(mesh: Mesh | None, vocab: int) -> NamedSharding | None:
    """Return the sharding of logits [Q, vocab]: split by words if the devices divide them evenly, else replicated."""
    if mesh is None:
        return None
    return NamedSharding(mesh, PartitionSpec(None, "tensor") if vocab % mesh.size == 0 else PartitionSpec())


def bounds_place(mesh: Mesh | None, vocab: int) -> BoundsPlace:
    """Return the shardings of bounds of so many words."""
    return BoundsPlace(everywhere_on(mesh), sharding_of_logits(mesh, vocab))


type OnCompile = Callable[[str], None]

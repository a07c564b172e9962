"""What a program is: a pure function of the device's state and some inputs, compiled once for each of its shapes."""

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
BOUNDS = "bounds"  # what draws are bound to, by seat
# Read like a model, by engines that constrain sequences on the device.
CONSTRAINT = "constraint"


@dataclass(frozen=True)
class Device:
    """What a program finds while it is traced: the models and parts of the state that it asked for, and where it runs.

    `kv` and the like are what `state` holds; a program returns what it has made of them.
    """

    models: Mapping[str, Any]
    state: Mapping[str, Any]
    backend: AttentionBackend
    mesh: Mesh | None

    def readable(self, tree: Any) -> Any:
        """What the host reads, or a later program gets: whole on every device."""
        everywhere = everywhere_on(self.mesh)
        return tree if everywhere is None else lax.with_sharding_constraint(tree, everywhere)

    def split_by_word(self, logits: jax.Array) -> jax.Array:
        """Logits [Q, vocab] that a later program gets: each device keeps those of its own words."""
        sharding = sharding_of_logits(self.mesh, logits.shape[-1])
        return logits if sharding is None else lax.with_sharding_constraint(logits, sharding)

    def placed(self, bounds: Bounds) -> Bounds:
        """The bounds where they lay before: whole on every device, but for the counts."""
        return replace(self.readable(replace(bounds, counts=())), counts=self.split_by_word(bounds.counts))


class Program(Protocol):
    """A function of models, of parts of the device's state that it changes in place, and of inputs.

    The runner compiles it for a shape when it is first launched with that; `shapes` are those that an engine can need.
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
        """The program with that shape in words, for logs and progress lines."""
        ...

    def idle(self, shape: Any, place: Place) -> tuple[Any, ...]:
        """Inputs of that shape that do nothing: arrays where a host sends them, `jax.ShapeDtypeStruct` where another
        program has left them on the device."""
        ...

    @property
    def run(self) -> Callable[..., tuple[dict[str, Any], Any]]:
        """(device, shape, *inputs) -> the parts of the state that it `writes`, and its results."""
        ...


@dataclass(frozen=True)
class Place:
    """What inputs depend on besides their shape: the sizes of the state, and where on devices lies what a program left
    there, whole on each or split by words. None: on the default device."""

    num_slots: int
    num_seats: int
    model: DecoderLM
    whole: jax.sharding.Sharding | None
    split_by_word: jax.sharding.Sharding | None


def everywhere_on(mesh: Mesh | None) -> NamedSharding | None:
    """Whole on every device of a mesh; None: one device, nothing to say."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def sharding_of_logits(mesh: Mesh | None, vocab: int) -> NamedSharding | None:
    """Of logits [Q, vocab]: split by words where these can be shared out evenly."""
    if mesh is None:
        return None
    return NamedSharding(mesh, PartitionSpec(None, "tensor") if vocab % mesh.size == 0 else PartitionSpec())


def bounds_place(mesh: Mesh | None, vocab: int) -> BoundsPlace:
    """Where bounds of so many words lie."""
    return BoundsPlace(everywhere_on(mesh), sharding_of_logits(mesh, vocab))


type OnCompile = Callable[[str], None]

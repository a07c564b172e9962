"""Weights of a model on the device: its leaves by path, which every launch reads and an update replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return what a program is compiled for: the array's shape, dtype and sharding; a NumPy array has no sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


class ModelWeights:
    """Weights of one model. They are the only holder of its arrays: the module exists with shapes alone.

    Attributes:
        shapes: the module, with shapes in the place of arrays; programs merge traced arrays into its graph.
        paths: "layers.0.mlp.up.kernel" and the like, one for each leaf.
        number: of each path, its place among them.
        leaves: arrays in the same order, as programs take them.
        wanted: of each leaf, the shape, type and sharding that programs are compiled for.
        lent: of each leaf, whether a caller holds it too: it is never donated, deleted or moved.
    """

    def __init__(self, model: nnx.Module, *, lent: bool | Sequence[bool] = False) -> None:
        self._graph, state = nnx.split(model)
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(state)
        self.paths = tuple(".".join(str(key.key) for key in path if hasattr(key, "key")) for path, _ in with_paths)
        self.number = {path: index for index, path in enumerate(self.paths)}
        # A leaf on the host would be sent again with every launch.
        self.leaves: list[Any] = [
            leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf) for _, leaf in with_paths
        ]
        self.lent = [lent] * len(self.leaves) if isinstance(lent, bool) else list(lent)
        self._was_dropped = False
        self.wanted = [shape_of(leaf) for leaf in self.leaves]
        self.shapes: Any = self.module_of(self.wanted)

    def module_of(self, leaves: list[Any]) -> Any:
        """Return the module around leaves in the order of `paths`."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))

    @property
    def shapes_of_leaves(self) -> dict[str, tuple[int, ...]]:
        """The shape of each leaf, by path."""
        return dict(zip(self.paths, (leaf.shape for leaf in self.wanted), strict=True))

    @property
    def module(self) -> Any:
        """The module around the weights of now."""
        return self.module_of(self.leaves)

    def replace(self, index: int, new: Any, *, is_lent: bool) -> None:
        """Put new values into the place of a leaf, with its type and sharding. No program compiles again.

        An owned leaf's memory is written anew. A lent one is let go, and `new` takes its place, as it is if type and
        placement fit.

        Args:
            new: an array of the leaf's shape.
            is_lent: whether a caller keeps `new`.
        """
        old, shape = self.leaves[index], self.wanted[index]
        if not old.is_deleted() and old.sharding.memory_kind != _memory_of(shape):
            old.delete()  # it sleeps on the host
        moved = jax.device_put(new, shape.sharding)  # no copy if it is there already
        if not self.lent[index] and not old.is_deleted():
            self.leaves[index] = _into(shape.sharding)(old, moved)
        elif _fits(new, shape) and (self.lent[index] or not is_lent):
            self.leaves[index], self.lent[index] = moved, is_lent
        else:
            self.leaves[index], self.lent[index] = _copied(shape.sharding)(moved, shape.dtype), False
        jax.block_until_ready(self.leaves[index])  # one at a time: copies that wait keep their sources

    def own(self) -> None:
        """Take over lent leaves, which no caller holds any more."""
        self.lent[:] = [False] * len(self.lent)
        # Arrays without a place of their own are others for jit: the second update would compile again.
        self.leaves = [
            jax.device_put(leaf, wanted.sharding) for leaf, wanted in zip(self.leaves, self.wanted, strict=True)
        ]

    @property
    def may_be_lost(self) -> bool:
        """Whether a leaf may be gone without an update: it was lent, or dropped."""
        return self._was_dropped or any(self.lent)

    @property
    def are_here(self) -> bool:
        """Whether all leaves are on the device."""
        pairs = zip(self.leaves, self.wanted, strict=True)
        return all(not x.is_deleted() and x.sharding.memory_kind == _memory_of(wanted) for x, wanted in pairs)

    def lost(self) -> list[str]:
        """Paths of leaves that are gone: dropped, or lent ones that their other holder has deleted or donated."""
        return [path for path, leaf in zip(self.paths, self.leaves, strict=True) if leaf.is_deleted()]

    def leave_device(self, *, keep: bool) -> None:
        """Free the memory of owned leaves on the device.

        Args:
            keep: whether they are kept in the host's memory.
        """
        self._was_dropped = not keep
        for index, (leaf, is_lent) in enumerate(zip(self.leaves, self.lent, strict=True)):
            if is_lent or leaf.is_deleted():
                continue
            if keep:
                there = leaf.sharding.with_memory_kind("pinned_host")
                self.leaves[index] = jax.block_until_ready(jax.device_put(leaf, there))
            leaf.delete()

    def return_to_device(self) -> None:
        """Bring leaves back that are kept in the host's memory."""
        for index, (leaf, wanted) in enumerate(zip(self.leaves, self.wanted, strict=True)):
            if not leaf.is_deleted() and leaf.sharding.memory_kind != _memory_of(wanted):
                self.leaves[index] = jax.block_until_ready(jax.device_put(leaf, wanted.sharding))
                leaf.delete()


def _memory_of(wanted: jax.ShapeDtypeStruct) -> str | None:
    return None if wanted.sharding is None else wanted.sharding.memory_kind


def _fits(new: Any, wanted: jax.ShapeDtypeStruct) -> bool:
    """Whether an array is used as it is."""
    if not isinstance(new, jax.Array) or new.dtype != wanted.dtype:
        return False
    assert wanted.sharding is not None
    return new.sharding.is_equivalent_to(wanted.sharding, new.ndim)


@functools.cache
def _copied(sharding: Any) -> Callable[..., jax.Array]:
    """(array, dtype) -> a copy that is held here alone."""
    return jax.jit(lambda array, dtype: jnp.copy(array).astype(dtype), static_argnums=1, out_shardings=sharding)


@functools.cache
def _into(sharding: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(old, new) -> the new values in the old one's memory."""
    return jax.jit(lambda old, new: new.astype(old.dtype), donate_argnums=0, keep_unused=True, out_shardings=sharding)


def detached[M: nnx.Module](model: M) -> M:
    """Return another module around the same arrays, which `hollow` may empty."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x, state))


def hollow(*models: nnx.Module) -> None:
    """Put shapes in the place of modules' arrays, so that they keep none of them."""
    for model in models:
        nnx.update(model, jax.tree.map(shape_of, nnx.split(model)[1]))

"""The weight map: which Hugging Face tensor fills which share of which parameter, by the rows of a layout."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.checkpoint.errors import CheckpointError, some_of
from jaxinfer.checkpoint.layout import BASE_PREFIX, Layout, OfLayer, layout_of
from jaxinfer.checkpoint.rows import Row
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import order_of_head

# A parameter is sharded over the mesh axis "tensor" along the first of these axes that it has.
SHARDED_AXES = ("kv", "f", "x", "s", "v")
MESH_AXIS = "tensor"

_SMALLEST_NORM = 1e-7  # added to the norms of an output head's columns


@dataclass(frozen=True)
class Parameter:
    """One parameter of a configuration: its path in the module tree, its shape, its axes, its sharding."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: PartitionSpec
    dtype: np.dtype | None = None  # its own dtype; None: that of the weights


@dataclass(frozen=True)
class Placement:
    """A row of the map applied to one configuration, layer and expert, with sizes filled in.

    Attributes:
        source, source_shape: the Hugging Face tensor.
        taken: the part of its first axis that goes into the parameter; None: all of it.
        target: the whole parameter.
        part: the index of this source's share in the parameter.
        grouped_shape: the shape of the source with its fused axes separated.
        order: the parameter's axes as numbers of the source's separated axes.
        offsets: element i of the source is element i of the parameter minus i.
        head: the separated source axis that is permuted by `order_of_head`; None: no axis is.
        rotary_dim: number of rotated dimensions of that axis.
        in_pairs: rotated dimensions are paired with their neighbours in the source.
        is_normed: the parameter's columns are the source's divided by their norms.
        added: what is added to the source.
        is_norm: it is the scale of a norm.
    """

    source: str
    source_shape: tuple[int, ...]
    target: Parameter
    part: tuple[slice, ...]
    grouped_shape: tuple[int, ...]
    order: tuple[int, ...]
    offsets: bool = False
    taken: slice | None = None
    head: int | None = None
    rotary_dim: int = 0
    in_pairs: bool = False
    is_normed: bool = False
    added: float = 0.0
    is_norm: bool = False

    def dtype_in_file(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in which the source is written, beside weights of `dtype`: norms have no dtype of theirs."""
        return dtype if self.is_norm or self.target.dtype is None else self.target.dtype

    @property
    def is_whole_as_stored(self) -> bool:
        """Whether the source tensor has the parameter's elements in the same order."""
        same = self.grouped_shape == self.target.shape and self.order == tuple(range(len(self.order)))
        return same and not self.offsets and self.head is None and not self.is_normed and not self.added

    def store(self, source: np.ndarray, parameter: np.ndarray) -> None:
        """Write the taken part of the source tensor into its share of the whole parameter; cast if dtypes differ."""
        parameter[self.part] = self.values(source)

    def values(self, source: Any, xp: Any = np) -> Any:
        """Return the share of the parameter that the taken part of the source tensor fills.

        Args:
            xp: the module that computes: numpy, or jax.numpy with a traced source.
        """
        values = source.reshape(self.grouped_shape)
        if self.head is not None:
            values = values.take(self._order_of_head(), axis=self.head)
        if self.added:
            values = values.astype(xp.float32) + xp.float32(self.added)
        if self.is_normed:
            values = values.astype(xp.float32)
            values = values / (xp.linalg.norm(values, axis=0, keepdims=True) + _SMALLEST_NORM)
        values = values.transpose(self.order)
        return values + xp.arange(len(values)) if self.offsets else values

    def to_source(self, target: np.ndarray) -> np.ndarray:
        """Return the taken part of the source tensor from the whole parameter; inverse of `store`, except for norms."""
        values = target[self.part].transpose(np.argsort(self.order))
        if self.head is not None:
            values = values.take(np.argsort(self._order_of_head()), axis=self.head)
        if self.added:
            values = values - np.float32(self.added)
        values = values.reshape(self.taken_shape)
        return values - np.arange(len(values), dtype=values.dtype) if self.offsets else values

    def _order_of_head(self) -> np.ndarray:
        assert self.head is not None
        return order_of_head(self.grouped_shape[self.head], self.rotary_dim, in_pairs=self.in_pairs)

    @property
    def taken_shape(self) -> tuple[int, ...]:
        """Shape of the taken part of the source tensor."""
        if self.taken is None:
            return self.source_shape
        return (self.taken.stop - self.taken.start, *self.source_shape[1:])


def placements(config: ModelConfig | Layout) -> tuple[Placement, ...]:
    """Return the weight map of a configuration: a placement for each row, layer and expert, parameter by parameter."""
    layout = layout_of(config)
    found: dict[str, list[Placement]] = {}
    for row in layout.rows:
        for layer in range(layout.num_layers if "{i}" in row.source else 1):
            fields = layout.of_layer(layer).fields
            if (row.when and row.when not in fields) or not fields.isdisjoint(row.unless):
                continue
            if row.layers and row.layers != ("dense" if layer in layout.dense_layers else "sparse"):
                continue
            for expert in range(layout.sizes["e"] if "{j}" in row.source else 1):
                placement = _place(row, layer, expert, layout)
                found.setdefault(placement.target.path, []).append(placement)
    return tuple(placement for group in found.values() for placement in group)


def parameters(config: ModelConfig | Layout) -> tuple[Parameter, ...]:
    """Return every parameter of a configuration once."""
    return tuple(dict.fromkeys(placement.target for placement in placements(config)))


def match_sources(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig | Layout) -> dict[str, str]:
    """Return the tensor of a checkpoint for each source: source name in the map -> name in the checkpoint.

    Every tensor in `shapes` is the tensor of one source, or is known to be unused (`ignored`, `left_out` and
    `tied_copies` of the layout; the reader compares the contents of the last).

    Raises:
        CheckpointError: tensors are missing, left over, or have another shape than `config` says.
    """
    layout = layout_of(config)
    wanted = {placement.source: placement for placement in placements(layout)}
    bare = not any(layout.mapped(name).startswith(BASE_PREFIX) for name in shapes)
    stored: dict[str, str] = {}
    # Names without an alias come last, so that they win; an aliased tensor with the same mapped name is left over.
    for name in sorted(shapes, key=lambda name: (layout.mapped(name) == name, name)):
        stored[layout.mapped(name)] = name
    named = {}
    for source in wanted:
        plain = source.removeprefix(BASE_PREFIX) if bare else source
        named[source] = stored.get(plain, plain)
    ignored = matching(shapes, (*layout.ignored, *layout.left_out))
    ignored |= {copy for copy in tied_copies(shapes, layout)}
    missing = [name for name in named.values() if name not in shapes]
    left = sorted(set(shapes) - set(named.values()) - ignored)
    if missing or left:
        raise CheckpointError(
            f"the tensors do not match {layout.name}: "
            + "; ".join(
                f"{word}: {some_of(names)}" for word, names in (("missing", missing), ("left over", left)) if names
            )
        )
    for source, placement in wanted.items():
        if tuple(shapes[named[source]]) != placement.source_shape:
            raise CheckpointError(
                f"{named[source]} has shape {list(shapes[named[source]])}, "
                f"but the configuration asks for {list(placement.source_shape)}"
            )
    return named


def matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the names of tensors that match one of some patterns."""
    wanted = tuple(patterns)
    return {name for name in names if any(fnmatch.fnmatchcase(f".{name}", each) for each in wanted)}


def tied_copies(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig | Layout) -> dict[str, str]:
    """Return tensors that repeat another one because embeddings are tied: name of the copy -> name of the original."""
    found = {}
    for pair in (layout_of(config).tied_copies or {}).items():
        copy, original = (name if name in shapes else name.removeprefix(BASE_PREFIX) for name in pair)
        if copy in shapes:
            found[copy] = original
    return found


def _place(row: Row, layer: int, expert: int, layout: Layout) -> Placement:
    # (start, length) of each source on the axis `slot`, and the length of the whole axis.
    own = layout.of_layer(layer) if "{i}" in row.source else OfLayer(layout.sizes, layout.rotary_dim, layout.fields)
    sizes = own.sizes
    group = sizes["g"]
    slots = {"q": (0, group), "k": (group, 1), "v": (group + 1, 1), "gate": (0, 1), "up": (1, 1)}
    of_heads = group + (0 if "has_no_kv" in own.fields else 1 if "values_are_keys" in own.fields else 2)
    total = {"q": of_heads, "k": of_heads, "v": of_heads, "gate": 2, "up": 2}

    left, right = row.axes.split(" -> ")
    target_axes = right.split()
    source_axes = left.replace("(", " ( ").replace(")", " ) ").split()
    apart = [axis for axis in source_axes if axis not in "()"]
    part_sizes, whole_sizes = {"slot": 2, **sizes}, {"slot": 2, **sizes}
    part = [slice(None)] * len(target_axes)
    start, length = slots.get(row.slot or "", (0, 0))
    if row.slot:
        part_sizes["slot"], whole_sizes["slot"] = length, total[row.slot]
        part[target_axes.index("slot")] = slice(start, start + length)
    if "{j}" in row.source:
        part_sizes["e"] = 1
        part[target_axes.index("e")] = slice(expert, expert + 1)
    source_shape, taken = _fused_shape(source_axes, part_sizes), None
    if row.is_one_of_three:
        per_slot = sizes["kv"] * sizes["d"]
        taken = slice(start * per_slot, (start + length) * per_slot)
        source_shape = ((group + 2) * per_slot, *source_shape[1:])
    split = next((axis for axis in SHARDED_AXES if axis in target_axes), None)
    dtype = "int32" if row.offsets else "float32" if row.norm and "float32_norms" in own.fields else row.dtype
    is_reordered = row.is_rotated and (own.rotary_dim < sizes["d"] or layout.pairs_neighbours)
    offset = {"": "", "layer": "norm_offset", "head": "norm_offset", "final": "final_norm_offset"}[row.norm]
    return Placement(
        source=row.source.format(i=layer, j=expert),
        source_shape=source_shape,
        target=Parameter(
            path=row.target.format(i=layer),
            shape=tuple(whole_sizes[axis] for axis in target_axes),
            axes=tuple(target_axes),
            spec=PartitionSpec(*(MESH_AXIS if axis == split else None for axis in target_axes)),
            dtype=None if dtype is None else np.dtype(dtype),
        ),
        part=tuple(part),
        grouped_shape=tuple(part_sizes[axis] for axis in apart),
        order=tuple(apart.index(axis) for axis in target_axes),
        offsets=row.offsets,
        taken=taken,
        head=apart.index("d") if is_reordered else None,
        rotary_dim=own.rotary_dim,
        in_pairs=layout.pairs_neighbours,
        is_normed=row.is_normed and "normalizes_head" in layout.fields,
        added=1.0 if offset in own.fields else 0.0,
        is_norm=bool(row.norm),
    )


def _fused_shape(axes: list[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of axes; those between parentheses are one axis."""
    shape: list[int] = []
    fused: list[int] | None = None
    for axis in axes:
        if axis == "(":
            fused = []
        elif axis == ")":
            shape.append(math.prod(fused or ()))
            fused = None
        elif fused is None:
            shape.append(sizes[axis])
        else:
            fused.append(sizes[axis])
    return tuple(shape)

"""New weights for a loaded model: from a tree of arrays, a directory, or tensors by their Hugging Face names."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.checkpoint.directory import find_checkpoint, read_config
from jaxinfer.checkpoint.errors import some_of
from jaxinfer.checkpoint.layout import BASE_PREFIX, Layout, layout_of
from jaxinfer.checkpoint.load import iter_parameters, open_weights, tensor_size
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel, spread
from jaxinfer.checkpoint.weight_map import Placement, matching, parameters, placements
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layer_config import LayerConfig
from jaxinfer.models.rope import RopeConfig
from jaxinfer.models.unknown_fields import ConfigOptions

_OF_NO_COMPUTATION = frozenset({
    "dtype", "eos_token_ids", "bos_token_id", "max_position_embeddings", "num_nextn_layers",
})  # fmt: skip


def leaves_of_tree(tree: Any) -> dict[str, Any]:
    """Return the arrays of an nnx module, an nnx state or a nested dict (or list) of arrays, by their paths."""
    if isinstance(tree, nnx.Module):
        tree = nnx.split(tree)[1]
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [str(getattr(key, "key", getattr(key, "idx", None))) for key in path if not hasattr(key, "name")]
        found[".".join(names)] = leaf
    return found


def leaves_of_directory(
    path: str | os.PathLike[str], mesh: Mesh | None, *, dtype: Any, **options: Unpack[ConfigOptions]
) -> tuple[ModelConfig, dict[str, tuple[int, ...]], Iterator[tuple[str, jax.Array]]]:
    """Open a converted or Hugging Face directory; all of its headers are checked.

    Args:
        dtype: as for `load_checkpoint`.

    Returns:
        The configuration, the shape of each parameter on its devices, by path, and an iterator that reads one after the
        other.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError, ValueError: as for `load_checkpoint`.
    """
    directory = find_checkpoint(path)
    _, config = read_config(directory, **options)
    final = parameters(for_tensor_parallel(config, tensor_size(mesh)))
    source = open_weights(directory, config, dtype)
    shapes = {parameter.path: parameter.shape for parameter in final}
    return config, shapes, iter_parameters(source, parameters(config), final, mesh)


def check_same_model(found: ModelConfig, own: ModelConfig, name: str) -> None:
    """Raise ValueError, naming the first field that differs, unless two configurations compute the same."""
    for field in dataclasses.fields(ModelConfig):
        if field.name in _OF_NO_COMPUTATION:
            continue
        theirs, ours = (_comparable(getattr(config, field.name)) for config in (found, own))
        if theirs != ours:
            raise ValueError(
                f"{name} is another model than the engine's: its {field.name} is {getattr(found, field.name)!r}, the "
                f"engine's is {getattr(own, field.name)!r}"
            )


def _comparable(value: Any) -> Any:
    """Return a field without limits that the computation does not read."""
    if isinstance(value, tuple) and value and isinstance(value[0], LayerConfig):
        return tuple(dataclasses.replace(layer, rope=_comparable(layer.rope)) for layer in value)
    if isinstance(value, RopeConfig) and value.rope_type in ("default", "linear"):
        return dataclasses.replace(value, max_position_embeddings=1, original_max_position_embeddings=1)
    return value


def regrouped(leaves: Mapping[str, Any], config: ModelConfig, devices: int) -> dict[str, Any]:
    """Return the leaves of a model as so many devices compute with them, where they are given as one does."""
    found = dict(leaves)
    for before, after in zip(parameters(config), parameters(for_tensor_parallel(config, devices)), strict=True):
        given = found.get(before.path)
        if given is not None and tuple(jnp.shape(given)) == before.shape:
            found[before.path] = spread(given, before, after)
    return found


class NamedTensors:
    """Assembly of a model's parameters on its devices, from tensors that come by their Hugging Face names in any order.

    A parameter that several tensors share (q, k, v; gate, up; experts) has a buffer until all of them have come.

    Args:
        config: the configuration of a checkpoint, before it is spread over devices.
        dtype: dtype of parameters without their own.
        final: the layout as its devices compute with it; None: the same.
    """

    def __init__(self, config: ModelConfig | Layout, dtype: Any, final: ModelConfig | Layout | None = None) -> None:
        layout = layout_of(config)
        self._layout, self._dtype = layout, dtype
        self._sources: dict[str, list[Placement]] = {}
        for variant in layout.variants():
            for placement in placements(variant):
                known = self._sources.setdefault(placement.source, [])
                if placement not in known:
                    known.append(placement)
        stored = parameters(layout)
        spread_out = stored if final is None else parameters(final)
        self._final = {before.path: (before, after) for before, after in zip(stored, spread_out, strict=True)}
        self._buffers: dict[str, jax.Array] = {}
        self._missing = {parameter.path: math.prod(parameter.shape) for parameter in stored}
        self._seen: set[str] = set()

    @property
    def incomplete(self) -> list[str]:
        """Paths of the parameters that lack something."""
        return [path for path, missing in self._missing.items() if missing]

    def assembled(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, jax.Array]]:
        """Yield each parameter, with its path, as soon as it is complete.

        Raises:
            ValueError: a tensor is unknown, comes twice or has another shape or type than the model; or parameters
                lack something when all have come.
        """
        for name, tensor in tensors:
            yield from self._put(name, tensor)
        if self.incomplete:
            raise ValueError(f"the tensors have ended, and parameters are incomplete: {some_of(self.incomplete)}")

    def _put(self, name: str, tensor: Any) -> Iterator[tuple[str, jax.Array]]:
        source = self._source_of(name)
        if source is None:
            return
        if source in self._seen:
            raise ValueError(f"tensor {name} comes twice")
        wanted = self._sources[source]
        shape = tuple(tensor.shape)
        if shape != wanted[0].source_shape:
            raise ValueError(f"tensor {name} has shape {list(shape)}, the model's has {list(wanted[0].source_shape)}")
        if not jnp.issubdtype(tensor.dtype, jnp.floating) and not all(each.offsets for each in wanted):
            raise ValueError(f"tensor {name} has type {tensor.dtype}, the model's has one of floats")
        self._seen.add(source)
        for placement in wanted:
            path = placement.target.path
            buffer = self._buffers.pop(path, None)
            if buffer is None:
                buffer = jnp.zeros(placement.target.shape, placement.target.dtype or self._dtype)
            rows = tensor if placement.taken is None else tensor[placement.taken]
            placed = _place(buffer, rows, _anywhere(placement))
            self._missing[path] -= math.prod(placement.taken_shape)
            if self._missing[path]:
                self._buffers[path] = placed
            else:
                yield path, spread(placed, *self._final[path])

    def _source_of(self, name: str) -> str | None:
        """Return a tensor's name in the weight map; None: it is known to be unused.

        Raises:
            ValueError: it is unknown.
        """
        layout = self._layout
        mapped = layout.mapped(name)
        for each in (mapped, f"{BASE_PREFIX}{mapped}"):
            if each in self._sources:
                return each
            # A trainer that unties its head in files writes the same array twice.
            if each in (layout.tied_copies or {}):
                return None
        if matching([name], (*layout.ignored, *layout.left_out)):
            return None
        raise ValueError(f"tensor {name} is not one of {layout.name}")


def assembled_model(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig, dtype: Any, mesh: Mesh | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the parameters of a model as its devices compute with them; see `NamedTensors.assembled`."""
    return NamedTensors(config, dtype, for_tensor_parallel(config, tensor_size(mesh))).assembled(tensors)


def check_leaves(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless shapes, by path, are those of the engine's leaves."""
    missing, left = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or left:
        lists = [f"{word}: {some_of(names)}" for word, names in (("missing", missing), ("unknown", left)) if names]
        raise ValueError(f"the leaves are not those of the model; {'; '.join(lists)}")
    for path, shape in wanted.items():
        if tuple(found[path]) != tuple(shape):
            raise ValueError(f"leaf {path} has shape {list(found[path])}, the engine's has {list(shape)}")


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0, keep_unused=True)
def _place(buffer: jax.Array, source: jax.Array, how: Placement) -> jax.Array:
    values = how.values(source, jnp)
    return buffer.at[how.part].set(values.astype(buffer.dtype))


def _anywhere(placement: Placement) -> Placement:
    """Return what a placement does, without names: layers that are alike share its program."""
    return dataclasses.replace(placement, source="", target=dataclasses.replace(placement.target, path=""))

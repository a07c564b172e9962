"""Loading of checkpoints onto devices: a converted or Hugging Face directory in, a model out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxinfer.checkpoint.directory import (
    WEIGHTS_FOLDER,
    find_checkpoint,
    is_converted,
    read_config,
)
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.checkpoint.huggingface import HuggingFaceWeights
from jaxinfer.checkpoint.orbax_store import StoredParameters
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel, regrouping
from jaxinfer.checkpoint.weight_map import MESH_AXIS, Parameter, parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model
from jaxinfer.models.unknown_fields import ConfigOptions


class ParameterViews(Protocol):
    """Source of parameters by their paths."""

    def view(self, name: str, index: Any = ..., /) -> Callable[[Any], np.ndarray]:
        """Return a function that reads any part (a slice per axis) of a parameter, or of what `index` selects of it."""
        ...


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: ModelConfig | None = None,
    **options: Unpack[ConfigOptions],
) -> tuple[ModelConfig, DecoderLM]:
    """Load the model of a converted directory, a Hugging Face directory or a hub id onto its devices.

    A converted directory is read shard by shard, straight onto the mesh; parameters of a Hugging Face directory are
    assembled on the host, one at a time.

    Args:
        path: the directory, or a hub id.
        dtype: dtype of the parameters ("float32", "bfloat16", "float16"); None or "auto" for the checkpoint's.
        mesh: mesh with an axis "tensor", over which the parameters are sharded; None for the default device.
        config: the configuration, as `read_config` returns it; None to read it here.
        options: `ignore_config_fields` and `strict_config` for reading the configuration, see `ConfigOptions`.

    Returns:
        The configuration that the devices compute, and the model. The configuration's dtype is the parameters'; on a
        mesh of more devices than key/value heads, these are replicated, see `for_tensor_parallel`.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointError: the checkpoint is incomplete, damaged, of an unsupported kind or does not fit its config.
        UnsupportedConfigError: its configuration asks for something that the engine does not compute.
        ValueError: unknown `dtype`, or the mesh cannot split the model evenly.
    """
    wanted = parse_dtype(dtype)
    directory = find_checkpoint(path)
    if config is None:
        _, config = read_config(directory, **options)
    effective = for_tensor_parallel(config, tensor_size(mesh))
    source = open_weights(directory, config, wanted)
    arrays = load_parameters(source, parameters(config), parameters(effective), mesh)
    effective = dataclasses.replace(effective, dtype=str(source.dtype))
    return effective, module_around(effective, arrays)


def open_weights(directory: Path, config: ModelConfig, dtype: Any) -> StoredParameters | HuggingFaceWeights:
    """Open a converted or Hugging Face directory; its headers are checked.

    Raises:
        FileNotFoundError, CheckpointError: as for `load_checkpoint`.
    """
    if is_converted(directory):
        return StoredParameters(directory / WEIGHTS_FOLDER, parameters(config), dtype)
    return HuggingFaceWeights(directory, config, dtype)


def load_parameters(
    source: ParameterViews,
    stored: Sequence[Parameter],
    final: Sequence[Parameter],
    mesh: Mesh | None,
) -> dict[str, jax.Array]:
    """Load parameters onto their devices; the result has them by their paths.

    Args:
        source: source of the parameters in the layout of `stored`.
        final: the parameters as the devices compute with them, see `for_tensor_parallel`.
        mesh: as for `load_checkpoint`.

    Raises:
        CheckpointError: a parameter is damaged, or does not fit into the dtype.
    """
    return dict(iter_parameters(source, stored, final, mesh))


def iter_parameters(
    source: ParameterViews, stored: Sequence[Parameter], final: Sequence[Parameter], mesh: Mesh | None
) -> Iterator[tuple[str, jax.Array]]:
    """Load parameters one after the other, as `load_parameters` does; yields each with its path."""
    for before, after in zip(stored, final, strict=True):
        index = ... if before.shape == after.shape else regrouping(before, after)
        array = _on_devices(source.view(before.path, index), after, mesh)
        # Waiting keeps one parameter on the host: queued transfers would keep their sources in memory.
        yield before.path, jax.block_until_ready(array)


def tensor_size(mesh: Mesh | None) -> int:
    """Number of devices over which a mesh shards parameters.

    Raises:
        ValueError: the mesh has no axis "tensor".
    """
    if mesh is None:
        return 1
    if MESH_AXIS not in mesh.axis_names:
        raise ValueError(f"the mesh must have an axis {MESH_AXIS!r}, got axes {mesh.axis_names}")
    return mesh.shape[MESH_AXIS]


def _on_devices(read: Callable[[Any], np.ndarray], parameter: Parameter, mesh: Mesh | None) -> jax.Array:
    """Put a parameter on its devices; a shard that several of them hold is read once."""
    sharding = SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, parameter.spec)
    shares: dict[Any, np.ndarray] = {}

    def share(part: Any) -> np.ndarray:
        if part not in shares:
            shares[part] = read(part)
        return shares[part]

    return jax.make_array_from_callback(parameter.shape, sharding, share)


def module_around(config: ModelConfig, arrays: Mapping[str, Any]) -> DecoderLM:
    """Build the module of `config` from `arrays` by their paths, or from their shapes, without initialising any."""
    dtype = jnp.dtype(config.dtype)
    return around(nnx.eval_shape(lambda: build_model(config, dtype=dtype, rngs=nnx.Rngs(0))), arrays)


def around[M: nnx.Module](abstract: M, arrays: Mapping[str, Any]) -> M:
    """Replace the shapes of an abstract module with `arrays`, which are given by their paths."""
    graph, state = nnx.split(abstract)
    flat = {path: variable.replace(arrays[".".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))

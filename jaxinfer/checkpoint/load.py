"""Checkpoints onto devices: a converted directory or a Hugging Face directory in, a model out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

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


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: ModelConfig | None = None,
    **options: Unpack[ConfigOptions],
) -> tuple[ModelConfig, DecoderLM]:
    """The model of a converted directory, a Hugging Face directory or a hub id, its parameters on their devices.

    A converted directory is read share by share, straight onto the mesh; of a Hugging Face directory, one parameter at
    a time is assembled on the host.

    Args:
        path: the directory, or a hub id.
        dtype: of the parameters ("float32", "bfloat16", "float16"); None or "auto" for the checkpoint's.
        mesh: has an axis "tensor" over which the parameters are split; None for the default device.
        config: as `read_config` has returned it; None to read it here.
        options: `ignore_config_fields` and `strict_config` for reading it, see `ConfigOptions`.

    Returns:
        The configuration as the devices compute it (its dtype is the parameters'; on a mesh of more devices than
        key/value heads, these are repeated, see `for_tensor_parallel`) and the model.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        CheckpointError: the checkpoint is incomplete, damaged, of an unsupported kind or does not fit its config.
        UnsupportedConfigError: its configuration asks for something that the engine does not compute.
        ValueError: unknown `dtype`, or the mesh cannot split the model evenly.
    """
    wanted = parse_dtype(dtype)
    directory = find_checkpoint(path)
    converted = is_converted(directory)
    if config is None:
        _, config = read_config(directory, **options)
    effective = for_tensor_parallel(config, tensor_size(mesh))
    if converted:
        source = StoredParameters(directory / WEIGHTS_FOLDER, parameters(config), wanted)
    else:
        source = HuggingFaceWeights(directory, config, wanted)
    arrays = load_parameters(source, parameters(config), parameters(effective), effective.num_kv_heads, mesh)
    effective = dataclasses.replace(effective, dtype=str(source.dtype))
    return effective, module_around(effective, arrays)


def load_parameters(
    source: StoredParameters | HuggingFaceWeights,
    stored: Sequence[Parameter],
    final: Sequence[Parameter],
    num_kv_heads: int,
    mesh: Mesh | None,
) -> dict[str, jax.Array]:
    """Parameters on their devices, by their paths.

    Args:
        source: has them as `stored` says.
        final: the same with `num_kv_heads` key/value heads, see `for_tensor_parallel`.
        mesh: as for `load_checkpoint`.

    Raises:
        CheckpointError: one is damaged, or does not fit into the dtype.
    """
    arrays = {}
    for before, after in zip(stored, final, strict=True):
        index = ... if before.shape == after.shape else regrouping(before, num_kv_heads)
        array = _on_devices(source.view(before.path, index), after, mesh)
        # Waiting keeps the host's share at one parameter: transfers would otherwise queue up with their sources.
        arrays[before.path] = jax.block_until_ready(array)
    return arrays


def tensor_size(mesh: Mesh | None) -> int:
    """Over how many devices a mesh splits parameters.

    Raises:
        ValueError: it has no axis for that.
    """
    if mesh is None:
        return 1
    if MESH_AXIS not in mesh.axis_names:
        raise ValueError(f"the mesh must have an axis {MESH_AXIS!r}, got axes {mesh.axis_names}")
    return mesh.shape[MESH_AXIS]


def _on_devices(read: Callable[[Any], np.ndarray], parameter: Parameter, mesh: Mesh | None) -> jax.Array:
    """A parameter on its devices; a share that several of them keep is read once."""
    sharding = SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, parameter.spec)
    shares: dict[Any, np.ndarray] = {}

    def share(part: Any) -> np.ndarray:
        if part not in shares:
            shares[part] = read(part)
        return shares[part]

    return jax.make_array_from_callback(parameter.shape, sharding, share)


def module_around(config: ModelConfig, arrays: Mapping[str, Any]) -> DecoderLM:
    """The module of `config` around `arrays`, or their shapes, by their paths; none is ever initialised."""
    dtype = jnp.dtype(config.dtype)
    return around(nnx.eval_shape(lambda: build_model(config, dtype=dtype, rngs=nnx.Rngs(0))), arrays)


def around[M: nnx.Module](abstract: M, arrays: Mapping[str, Any]) -> M:
    """A module that has shapes only, with `arrays` by their paths in their place."""
    graph, state = nnx.split(abstract)
    flat = {path: variable.replace(arrays[".".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))

"""Checkpoints onto devices: a converted directory or a Hugging Face directory in, a model out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxinfer.checkpoint.directory import (
    FORMAT_FILE,
    WEIGHTS_FOLDER,
    find_checkpoint,
    is_converted,
    read_config,
    read_json,
)
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.huggingface import HuggingFaceWeights
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel, repeat_kv_heads, stored_sharding
from jaxinfer.checkpoint.weight_map import MESH_AXIS, Parameter, parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model


def load_checkpoint(
    path: str | os.PathLike[str], *, dtype: Any = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, DecoderLM]:
    """The model of a converted directory, a Hugging Face directory or a hub id, its parameters on their devices.

    A converted directory is read share by share, straight onto the mesh; of a Hugging Face directory, one parameter at
    a time is assembled on the host.

    Args:
        path: the directory, or a hub id.
        dtype: of the parameters ("float32", "bfloat16", "float16"); None or "auto" for the checkpoint's.
        mesh: has an axis "tensor" over which the parameters are split; None for the default device.

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
    _, config = read_config(directory)
    effective = for_tensor_parallel(config, _tensor_size(mesh))
    if converted:
        stored = parse_dtype(read_json(directory / FORMAT_FILE).get("dtype"))
        if stored is None:
            raise CheckpointError(f"{directory / FORMAT_FILE} names no dtype; convert the source again")
        wanted = wanted or stored
        arrays = _restore(directory / WEIGHTS_FOLDER, config, effective, wanted, mesh)
        if wanted == np.float16 and stored != np.float16:
            _check_finite(arrays, directory)
    else:
        weights = HuggingFaceWeights(directory, config, wanted)
        wanted = weights.dtype
        arrays = _assemble(weights, config, effective, mesh)
    effective = dataclasses.replace(effective, dtype=str(wanted))
    return effective, _module(effective, arrays)


def _tensor_size(mesh: Mesh | None) -> int:
    if mesh is None:
        return 1
    if MESH_AXIS not in mesh.axis_names:
        raise ValueError(f"the mesh must have an axis {MESH_AXIS!r}, got axes {mesh.axis_names}")
    return mesh.shape[MESH_AXIS]


def _sharding(parameter: Parameter, mesh: Mesh | None) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, parameter.spec)


def _restore(
    path: Path, config: ModelConfig, effective: ModelConfig, dtype: np.dtype, mesh: Mesh | None
) -> dict[str, jax.Array]:
    from jaxinfer.checkpoint.orbax_store import restore_parameters  # slow to import, only needed here

    wanted, regroup = {}, {}
    for parameter, final in zip(parameters(config), parameters(effective), strict=True):
        sharding = _sharding(final, mesh)
        if parameter.shape != final.shape and mesh is not None:
            regroup[parameter.path] = jax.jit(
                partial(repeat_kv_heads, parameter=parameter, num_kv_heads=effective.num_kv_heads),
                out_shardings=sharding,
            )
            sharding = stored_sharding(parameter, config.num_kv_heads, mesh)
        wanted[parameter.path] = jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=sharding)
    arrays = restore_parameters(path, wanted)
    for name, function in regroup.items():
        arrays[name] = function(arrays[name])
    return arrays


def _assemble(
    weights: HuggingFaceWeights, config: ModelConfig, effective: ModelConfig, mesh: Mesh | None
) -> dict[str, jax.Array]:
    arrays = {}
    for parameter, final in zip(parameters(config), parameters(effective), strict=True):
        array = weights.read(parameter.path)
        if parameter.shape != final.shape:
            array = repeat_kv_heads(array, parameter, effective.num_kv_heads)
        # Waiting keeps the host's share at one parameter: transfers would otherwise queue up with their sources.
        arrays[parameter.path] = jax.block_until_ready(jax.device_put(array, _sharding(final, mesh)))
    return arrays


def _check_finite(arrays: Mapping[str, jax.Array], directory: Path) -> None:
    finite: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: jnp.isfinite(x).all())
    for name, array in arrays.items():
        if not finite(array):
            raise CheckpointError(
                f"{name} in {directory} has values that float16 cannot hold (its largest is 65504, and NaN or infinity "
                "are not weights); use bfloat16 or float32"
            )


def _module(config: ModelConfig, arrays: Mapping[str, jax.Array]) -> DecoderLM:
    """The module of `config` around `arrays`, without ever initialising one."""
    dtype = jnp.dtype(config.dtype)
    abstract = nnx.eval_shape(lambda: build_model(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = {path: variable.replace(arrays[".".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))

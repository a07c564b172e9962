"""Tensor parallelism over more devices than a checkpoint has key/value heads: each head is kept by several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.weight_map import MESH_AXIS, Parameter
from jaxinfer.models.config import ModelConfig

_REPLICA_AXIS = "replica"


def for_tensor_parallel(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration that `size` devices compute: `config`, or one with each key/value head repeated.

    With more devices than key/value heads, every head is repeated on `size / num_kv_heads` devices and its group of
    query heads is split among them; the model's output is the same.

    Raises:
        ValueError: a dimension cannot be split evenly; names the field.
    """
    for name in ("vocab_size", "intermediate_size", "num_heads"):
        if getattr(config, name) % size:
            raise ValueError(f"tensor_parallel_size={size} does not divide {name}={getattr(config, name)}")
    if config.num_kv_heads % size == 0:
        return config
    if size % config.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={size} neither divides nor is a multiple of num_kv_heads={config.num_kv_heads}"
        )
    return dataclasses.replace(config, num_kv_heads=size)


def repeat_kv_heads(array: Any, parameter: Parameter, num_kv_heads: int) -> Any:
    """A parameter, a numpy or jax array, regrouped for `num_kv_heads`, a multiple of the heads it has.

    The fused projection [..., kv, g + 2, d] gets every head's k and v several times, each beside its share of the
    head's queries; the output projection [kv, g, d, h] only counts its groups anew. Others stay as they are.
    """
    if "kv" not in parameter.axes:
        return array
    axis = parameter.axes.index("kv")
    lead, (heads, rows), tail = array.shape[:axis], array.shape[axis : axis + 2], array.shape[axis + 2 :]
    repeats = num_kv_heads // heads
    if "slot" not in parameter.axes:
        return array.reshape(*lead, num_kv_heads, rows // repeats, *tail)
    xp = array.__array_namespace__()
    before = (slice(None),) * (axis + 1)
    q = array[*before, : rows - 2].reshape(*lead, num_kv_heads, (rows - 2) // repeats, *tail)
    kv = xp.repeat(array[*before, rows - 2 :], repeats, axis=axis)
    return xp.concat([q, kv], axis=axis + 1)


def stored_sharding(parameter: Parameter, num_kv_heads: int, mesh: Mesh) -> NamedSharding:
    """How a parameter of a checkpoint with `num_kv_heads` heads, fewer than devices, lies on `mesh` before it is
    regrouped: every device gets the key/value head that it will keep.
    """
    axis = mesh.axis_names.index(MESH_AXIS)
    shape = mesh.devices.shape
    devices = np.reshape(mesh.devices, (*shape[:axis], num_kv_heads, shape[axis] // num_kv_heads, *shape[axis + 1 :]))
    names = (*mesh.axis_names[: axis + 1], _REPLICA_AXIS, *mesh.axis_names[axis + 1 :])
    split = {"kv": MESH_AXIS, "g": _REPLICA_AXIS}
    return NamedSharding(Mesh(devices, names), PartitionSpec(*(split.get(name) for name in parameter.axes)))

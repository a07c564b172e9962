"""Placement of a model and of a batch's state: one device, or a mesh of devices that share every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxinfer.attention.backend import AttentionBackend, select_backend
from jaxinfer.attention.tensor_parallel import over_devices, sharding_of_pages
from jaxinfer.checkpoint.load import load_parameters, module_around, tensor_size
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.program import everywhere_on
from jaxinfer.textbook.devices import device_of


@dataclass(frozen=True)
class Placement:
    """Devices of a batch's arrays: those of a mesh, or one; with neither, the devices of the model's parameters."""

    mesh: Mesh | None = None
    device: Any = None  # a `jax.Device`

    @property
    def whole(self) -> Sharding | None:
        """Sharding of arrays that every device has whole; None: JAX's default."""
        return everywhere_on(self.mesh) if self.device is None else SingleDeviceSharding(self.device)

    @property
    def pages(self) -> Sharding | None:
        """Sharding of the KV pool's arrays, by heads; None: JAX's default."""
        return sharding_of_pages(self.mesh) if self.device is None else SingleDeviceSharding(self.device)

    @property
    def backend(self) -> AttentionBackend:
        """Code that computes attention there."""
        # "auto" is chosen for the default platform, whose kernels another one cannot run.
        elsewhere = self.device is not None and self.device.platform != jax.default_backend()
        return over_devices(select_backend("xla" if elsewhere else "auto"), self.mesh)


def placed(model: DecoderLM, device: Any = None) -> tuple[DecoderLM, Placement]:
    """Return the model on a device, and the placement of what is computed with it.

    Args:
        device: see `device_of`; None: where its parameters are, which may be a mesh.

    Raises:
        ValueError: as for `device_of`; or the model is sharded over several devices and a device is given, or over a
            mesh without an axis "tensor".
    """
    mesh = mesh_of(model)
    tensor_size(mesh)
    if device is None:
        return model, Placement(mesh)
    if mesh is not None:
        raise ValueError(f"device must be None for a model that is sharded over {mesh.size} devices, got {device!r}")
    found = device_of(device)
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.device_put(state, found)), Placement(None, found)


def mesh_of(model: DecoderLM) -> Mesh | None:
    """Return the mesh over which a model's parameters are sharded; None: they are on one device."""
    sharding = getattr(model.embed.embedding[...], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def over_mesh(model: DecoderLM, mesh: Mesh) -> DecoderLM:
    """Return a model of one device sharded over a mesh, as `load_checkpoint` shards it.

    Raises:
        ValueError: the mesh cannot split the model evenly.
    """
    try:
        effective = for_tensor_parallel(model.config, mesh.size)
    except ValueError as error:
        raise ValueError(f"tp_size={mesh.size} does not split the model: {error}") from error
    effective = replace(effective, dtype=str(model.dtype))
    stored, final = parameters(model.config), parameters(effective)
    return module_around(effective, load_parameters(_Held(model), stored, final, mesh))


class _Held:
    """Parameters of a model in memory, read like those of a checkpoint."""

    def __init__(self, model: DecoderLM) -> None:
        self._arrays = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}

    def view(self, name: str, index: Any = ...) -> Callable[[Any], np.ndarray]:
        """Return a function that gives parts (a slice per axis) of what `index` selects of a parameter."""
        array = np.asarray(self._arrays[name])[index]
        return lambda part: array[part]

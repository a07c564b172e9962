"""A compile-only H200: programs are compiled for it on a machine that has neither the GPU nor its driver."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies

TARGET = Path(__file__).with_suffix(".txtpb")
PLUGINS = ("xla_cuda13", "xla_cuda12")
NUM_CORES = 132


@cache
def h200() -> jax.Device:
    """The device, from the description of its sizes.

    Raises:
        ModuleNotFoundError: no CUDA plugin is installed.
    """
    jax.devices()  # JAX registers its plugins, those without a driver in vain, before one is registered by hand
    plugin = _plugin()
    try:
        xla_bridge.register_plugin("cuda", library_path=str(plugin))
    except Exception as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    description = TARGET.read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=description, topology="1x1x1")
    return topology.devices[0]


def _plugin() -> Path:
    for name in PLUGINS:
        try:
            module = importlib.import_module(f"jax_plugins.{name}")
        except ModuleNotFoundError:
            continue
        return Path(module.__path__[0]) / "xla_cuda_plugin.so"
    raise ModuleNotFoundError("no CUDA plugin of JAX is installed: install the extra cuda13")


def compile_for_h200(function: Any, *arguments: Any, **jit_options: Any) -> jax.stages.Compiled:
    """`function` compiled for arguments of these shapes.

    Args:
        arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        jit_options: for `jax.jit`.
    """
    mesh = jax.sharding.Mesh(np.array([h200()]), ("tensor",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
    # Pallas asks the abstract mesh which GPU it lowers for.
    target = jax.sharding.AbstractMesh(
        (1,),
        ("tensor",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=NUM_CORES, platform="gpu"),
    )
    with jax.sharding.use_abstract_mesh(target):
        return jax.jit(function, **jit_options).lower(*shapes).compile()

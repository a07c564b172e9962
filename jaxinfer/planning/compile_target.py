"""Compile-only GPUs: programs are compiled for them on a machine that has neither the GPU nor its driver."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies

from jaxinfer.planning.devices import GPU

PLUGINS = ("xla_cuda13", "xla_cuda12")
# Limits that Hopper and the Blackwell of data centres share (CUDA programming guide, "Compute Capabilities").
_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {num_cores}
  clock_rate_ghz: {clock_ghz}
  l2_cache_size: {l2_bytes}
  device_memory_size: {memory_bytes}
  memory_bandwidth: {bandwidth:.0f}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 patch: 0 }}
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
device_description_str: "{device_kind}"
"""


class NoCompilerError(RuntimeError):
    """JAX's CUDA plugin, which holds the compiler, is not installed."""


@dataclass(frozen=True)
class CompileTarget:
    """A GPU, or several of a kind that share every layer, that programs can be compiled for."""

    gpu: GPU
    mesh: jax.sharding.Mesh  # of these devices over the axis "tensor"

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of the arguments of a program: replicated on every device."""
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    def shapes(self, tree: Any) -> Any:
        """Return the arrays (or shapes) of a pytree as shapes on this GPU."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), tree)

    def lowering(self) -> AbstractContextManager[Any]:
        """Return a context in which code that asks for the device, as Pallas and the backends do, gets this GPU."""
        device = AbstractDevice(device_kind=self.gpu.device_kind, num_cores=self.gpu.num_cores, platform="gpu")
        return jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh(
                (self.mesh.size,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
            )
        )

    def compile(self, function: Any, *arguments: Any, **jit_options: Any) -> jax.stages.Compiled:
        """Return `function`, compiled for arguments of these shapes.

        Args:
            arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
            jit_options: for `jax.jit`.
        """
        with self.lowering():
            return jax.jit(function, **jit_options).lower(*self.shapes(arguments)).compile()


@cache
def compile_target(gpu: GPU, num_devices: int = 1) -> CompileTarget:
    """Return compile-only devices of the kind `gpu`, made from the description of its sizes.

    Raises:
        NoCompilerError: no CUDA plugin of JAX is installed.
    """
    plugin = cuda_plugin()
    if plugin is None:
        raise NoCompilerError('no CUDA plugin of JAX is installed: pip install "jaxinfer[cuda13]"')
    jax.devices()  # JAX registers its plugins, those without a driver in vain, before one is registered by hand
    try:
        xla_bridge.register_plugin("cuda", library_path=str(plugin))
    except Exception as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    topology = topologies.get_topology_desc(
        f"{num_devices} {gpu.name}", platform="cuda", target_config=description(gpu), topology=f"1x1x{num_devices}"
    )
    return CompileTarget(gpu, jax.sharding.Mesh(np.array(topology.devices), ("tensor",)))


def description(gpu: GPU) -> str:
    """Return XLA's description of a GPU (a GpuTargetConfigProto as text): all that its compiler needs of a device."""
    major, minor = gpu.compute_capability
    return _DESCRIPTION.format(
        major=major,
        minor=minor,
        num_cores=gpu.num_cores,
        clock_ghz=gpu.clock_ghz,
        l2_bytes=gpu.l2_bytes,
        memory_bytes=gpu.memory_bytes,
        bandwidth=gpu.nominal_bandwidth,
        device_kind=gpu.device_kind,
    )


def cuda_plugin() -> Path | None:
    """Return the library of the installed CUDA plugin; None if there is none."""
    for name in PLUGINS:
        try:
            module = importlib.import_module(f"jax_plugins.{name}")
        except ModuleNotFoundError:
            continue
        return Path(module.__path__[0]) / "xla_cuda_plugin.so"
    return None

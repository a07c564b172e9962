"""The tensor-parallel backend: each device keeps some of the KV heads and attends with their queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.attention.metadata import AttentionMetadata
from jaxinfer.attention.residual import Residual, in_one_piece
from jaxinfer.field_checks import check_positive_integer
from kernels_pallas.branch_attention.blocks import AttentionSizes

# Specs of queries and projected heads [T, heads, ...], of pages [num_pages, page_size, heads, head_dim], and of
# replicated arrays.
_HEADS, _PAGES, _WHOLE = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor"), PartitionSpec()
_SINKS = PartitionSpec("tensor")  # [heads]
# Specs of experts: gate and up [experts, inner, 2, hidden], their biases [experts, inner, 2], and down [experts,
# hidden, inner].
_GATE_UP, _DOWN = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor")


def make_mesh(name: str, size: int) -> Mesh | None:
    """Return a mesh of the first `size` devices over the axis "tensor"; None for one device.

    Args:
        name: the setting's name, for messages.

    Raises:
        ValueError: `size` is not a number of devices that there are.
    """
    check_positive_integer(name, size)
    devices = jax.devices()
    if size > len(devices):
        of_cpu = f"; with JAX_NUM_CPU_DEVICES={size} in the environment the CPU is as many"
        raise ValueError(
            f"{name}={size}, but there are {len(devices)} devices" + (of_cpu if devices[0].platform == "cpu" else "")
        )
    return None if size == 1 else Mesh(np.array(devices[:size]), ("tensor",))


def sharding_of_pages(mesh: Mesh | None) -> NamedSharding | None:
    """Return the sharding of the KV pool's arrays: heads over the mesh axis "tensor"; None for one device."""
    return None if mesh is None else NamedSharding(mesh, _PAGES)


def over_devices(backend: AttentionBackend, mesh: Mesh | None) -> AttentionBackend:
    """Return `backend` with its KV heads sharded over the mesh axis "tensor"; without a mesh, `backend` itself.

    Every device runs the single-device code on its own heads: attention needs no communication, and kernels, which XLA
    cannot partition, run as they are. Products are partitioned by XLA, and not split into `Parts` as well.
    """
    if mesh is None:
        return backend
    # check_vma: what the loops of attention carry starts replicated, and differs between devices from then on.
    split = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def rotate_and_write(heads: ProjectedHeads, k_pages: jax.Array, v_pages: jax.Array, slots: jax.Array):
        heads = replace(heads, sinks=None)  # they have no part in this
        of_heads: Any = replace(jax.tree.map(lambda _: _WHOLE, heads), qkv=_HEADS)
        run = split(
            backend.rotate_and_write, in_specs=(of_heads, _PAGES, _PAGES, _WHOLE), out_specs=(_HEADS, _PAGES, _PAGES)
        )
        return run(heads, k_pages, v_pages, slots)

    def plan(metadata: AttentionMetadata, sizes: AttentionSizes, /) -> Any:
        heads, kv_heads = sizes.num_heads // mesh.size, sizes.num_kv_heads // mesh.size
        return backend.plan(metadata, replace(sizes, num_heads=heads, num_kv_heads=kv_heads))

    def attention(
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        plan: Any,
        /,
        *,
        scale: float,
        cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        leaves, structure = jax.tree.flatten(plan)

        def on_one(
            q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, filled: list[jax.Array], *sinks: jax.Array
        ) -> jax.Array:
            given = iter(filled)
            whole = structure.unflatten([next(given) if x.size else jnp.zeros(x.shape, x.dtype) for x in leaves])
            own = sinks[0] if sinks else None
            return backend.attention(q, k_pages, v_pages, whole, scale=scale, cap=cap, sinks=own)

        of_heads = () if sinks is None else (sinks,)
        specs = (_HEADS, _PAGES, _PAGES, _WHOLE, *(_SINKS for _ in of_heads))
        # Shardy (in jaxlib 0.11.2) crashes on an input without elements inside a loop, such as tail bits without tails.
        run = split(on_one, in_specs=specs, out_specs=_HEADS)
        return run(q, k_pages, v_pages, [x for x in leaves if x.size], *of_heads)

    def over_experts(
        mixture: Callable[..., jax.Array],
        given: Sequence[jax.Array],
        gate_up: jax.Array,
        down: jax.Array,
        *bias: jax.Array,
    ) -> jax.Array:
        # Every device has a shard of each expert, so that no device waits for another, whatever experts tokens choose.
        def on_one(given: Sequence[jax.Array], gate_up: jax.Array, down: jax.Array, *bias: jax.Array) -> jax.Array:
            return lax.psum(mixture(*given, gate_up, down, *bias), "tensor")

        specs = (_WHOLE, _GATE_UP, _DOWN, *(_GATE_UP for _ in bias))
        return split(on_one, in_specs=specs, out_specs=_WHOLE)(tuple(given), gate_up, down, *bias)

    @cache  # layers are traced once for each `Residual`
    def residual(tokens: int) -> Residual:
        own = backend.residual(tokens)

        def add_and_norm(x: jax.Array, y: Any, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
            run = split(lambda x, y, scale: own.add_and_norm(x, y, scale, eps), in_specs=_WHOLE, out_specs=_WHOLE)
            return run(x, y, scale)

        return replace(own, add_and_norm=add_and_norm, parts=in_one_piece, over_experts=over_experts)

    return replace(backend, plan=plan, attention=attention, rotate_and_write=rotate_and_write, residual=residual)

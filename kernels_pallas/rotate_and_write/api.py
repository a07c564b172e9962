"""Rotation of a step's heads and writes of K and V: the kernel if it can run, else the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.devices import tell_once, why_not_here
from kernels_pallas.parts import Parts, whole
from kernels_pallas.rotate_and_write import reference as plain
from kernels_pallas.rotate_and_write.mosaic_gpu import HeadsLaunch, rotate_and_write_heads
from kernels_pallas.rotate_and_write.reference import Heads

HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
# Most heads that one TMA copy takes.
MAX_HEADS = 256
# Limit of a thread block on Hopper, less what the compiler reserves.
SHARED_MEMORY_BYTES = 227 * 1024 - 2048


type Written = tuple[jax.Array, jax.Array, jax.Array]
type Reference = Callable[[Any, jax.Array, jax.Array, jax.Array], Written]


def rotate_and_write(
    heads: Heads,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    reference: Reference = plain.rotate_and_write,
    interpret: Any = None,
) -> Written:
    """Normalise and rotate queries and keys, and write keys and values into their slots, in place.

    Args:
        k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim].
        slot_mapping: int32 [T], no slot twice; keys and values of out-of-range slots are dropped.
        reference: computes the result from (heads, k_pages, v_pages, slot_mapping) if the kernel cannot run; the reason
            is logged once.
        interpret: `InterpretGPUParams`, to run the kernel on a CPU.

    Returns:
        Queries [T, num_kv_heads * group, head_dim] and the pages.
    """
    reason = why_not(heads, k_pages) or (None if interpret else why_not_here())
    if reason is not None:
        tell_once("rotation and KV write run", reason)
        return reference(heads, k_pages, v_pages, slot_mapping)
    scales, qkv = _scales(heads), heads.qkv
    if _launch(heads, qkv, k_pages).shared_memory_bytes > SHARED_MEMORY_BYTES:
        qkv = whole(qkv)
    launch = _launch(heads, qkv, k_pages)
    # XLA would fuse a slice of the step's integers with the kernel into one instruction, which does not tell that pages
    # are changed in place. A computed value is not fused.
    slot_mapping = jnp.minimum(slot_mapping, launch.num_slots)
    values, bias = (qkv.values, qkv.bias) if isinstance(qkv, Parts) else (qkv, None)
    return rotate_and_write_heads(
        values, bias, heads.cos, heads.sin, scales, k_pages, v_pages, slot_mapping, launch=launch, interpret=interpret
    )


def why_not(heads: Heads, k_pages: jax.Array) -> str | None:
    """Return the reason why the kernel does not take these shapes; None if it does."""
    scales, qkv = _scales(heads), heads.qkv
    # Parts that do not fit the shared memory are summed before the kernel, so they are no reason.
    launch = replace(_launch(heads, qkv, k_pages), parts=0, bias=False)
    if qkv.dtype.name not in DTYPES or k_pages.dtype != qkv.dtype:
        return f"heads are {qkv.dtype} and the cache {k_pages.dtype}, both must be one of {', '.join(DTYPES)}"
    if scales is not None and heads.norms_late:
        return "the norms of queries and keys follow their rotation"
    if scales is not None and (scales[0].dtype != scales[1].dtype or scales[0].dtype not in (qkv.dtype, jnp.float32)):
        found = f"the norms' scales are {scales[0].dtype} and {scales[1].dtype}"
        return f"{found}, both must be {qkv.dtype}, as heads are, or both float32"
    if launch.head_dim not in HEAD_DIMS:
        return f"head_dim is {launch.head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))}"
    if launch.query_heads > MAX_HEADS:
        return f"there are {launch.query_heads} query heads, at most {MAX_HEADS} are possible"
    if launch.shared_memory_bytes > SHARED_MEMORY_BYTES:
        return f"{launch.tile_rows} rows of head_dim {launch.head_dim} do not fit the shared memory"
    return None


def _launch(heads: Heads, qkv: jax.Array | Parts, k_pages: jax.Array) -> HeadsLaunch:
    cut = qkv if isinstance(qkv, Parts) else None
    values = qkv.values if isinstance(qkv, Parts) else qkv
    kv_heads, width, head_dim = values.shape[-3:]
    num_pages, page_size = k_pages.shape[:2]
    scales = _scales(heads)
    return HeadsLaunch(
        kv_heads=kv_heads,
        group=width - 2,
        head_dim=head_dim,
        page_size=page_size,
        num_slots=num_pages * page_size,
        eps=None if scales is None else heads.eps,
        wide_scale=scales is not None and scales[0].dtype != qkv.dtype,
        parts=0 if cut is None else len(cut),
        bias=cut is not None and cut.bias is not None,
        dtype=qkv.dtype,
    )


def _scales(heads: Heads) -> tuple[jax.Array, jax.Array] | None:
    """Return the scales of the queries' norm and of the keys'; None: there are no norms."""
    return None if heads.q_scale is None or heads.k_scale is None else (heads.q_scale, heads.k_scale)

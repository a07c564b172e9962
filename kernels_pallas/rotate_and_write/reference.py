"""Rotation and KV write in plain XLA: the kernel's reference, and the fallback where the kernel cannot run."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.add_and_norm.reference import rms_norm
from kernels_pallas.parts import Parts, whole


class Heads(Protocol):
    """A layer's projected heads: T tokens, each with `group` queries, a key and a value for every KV head."""

    @property
    def qkv(self) -> jax.Array | Parts: ...  # [T, num_kv_heads, group + 2, head_dim]

    @property
    def cos(self) -> jax.Array: ...  # float32 [T, head_dim / 2]

    @property
    def sin(self) -> jax.Array: ...  # float32 [T, head_dim / 2]

    @property
    def q_scale(self) -> jax.Array | None: ...  # [head_dim], scale of the queries' RMS norm; None: no norms

    @property
    def k_scale(self) -> jax.Array | None: ...  # [head_dim], scale of the keys' RMS norm; None: no norms

    @property
    def eps(self) -> float: ...

    @property
    def norms_late(self) -> bool: ...  # whether the norms follow the rotation


def rotate_and_write(
    heads: Heads, k_pages: jax.Array, v_pages: jax.Array, slot_mapping: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries ready for attention, and the pages with the heads' keys and values written to the slots."""
    q, k, v = rotate(heads)
    # Attention ignores values that are not finite. NaN keys keep that from being silent.
    k = jnp.where(jnp.all(jnp.isfinite(v), axis=-1, keepdims=True), k, jnp.nan)
    return q, write_kv(k_pages, k, slot_mapping), write_kv(v_pages, v, slot_mapping)


def rotate(heads: Heads) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q [..., T, num_heads, head_dim] and k, both normalised and rotated, and v; k and v have num_kv_heads.

    With `norms_late`, q and k are rotated first.
    """
    qkv = whole(heads.qkv)
    *lead, kv_heads, width, dim = qkv.shape
    group = width - 2
    q = qkv[..., :group, :].reshape(*lead, kv_heads * group, dim)
    k, v = qkv[..., group, :], qkv[..., group + 1, :]
    if not heads.norms_late:
        q, k = _normalised(heads, q, k)
    q, k = apply_rope(q, heads.cos, heads.sin), apply_rope(k, heads.cos, heads.sin)
    if heads.norms_late:
        q, k = _normalised(heads, q, k)
    return q, k, v


def _normalised(heads: Heads, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the RMS norms of q and k; without scales, q and k themselves."""
    if heads.q_scale is None or heads.k_scale is None:
        return q, k
    return rms_norm(q, heads.q_scale, heads.eps), rms_norm(k, heads.k_scale, heads.eps)


def rotate_queries(heads: Heads) -> jax.Array:
    """Return q [..., T, num_heads, head_dim], normalised and rotated, of heads [..., T, num_kv_heads, group, head_dim]
    that have no keys and values of their own; their norms precede the rotation."""
    q = whole(heads.qkv)
    q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
    if heads.q_scale is not None:
        q = rms_norm(q, heads.q_scale, heads.eps)
    return apply_rope(q, heads.cos, heads.sin)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the halves of x [..., heads, head_dim] by cos, sin [..., head_dim / 2]; float32 inside, x's dtype out."""
    dtype = x.dtype
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(dtype)


def write_kv(pages: jax.Array, new: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Write new [T, Hkv, D] to slots of pages [num_pages, page_size, Hkv, D]; slots out of range are dropped."""
    flat = pages.reshape(-1, *pages.shape[2:])
    new = new.astype(pages.dtype)
    if new.shape[0] > 1:
        flat = flat.at[slot_mapping].set(new, mode="drop", unique_indices=True)
    else:
        # On a CPU, a scatter of one token is not a loop, and XLA copies the whole pool before it: so write a loop.
        count = (slot_mapping[0] < flat.shape[0]).astype(jnp.int32)
        flat = lax.fori_loop(0, count, lambda _, x: lax.dynamic_update_slice_in_dim(x, new, slot_mapping[0], 0), flat)
    return flat.reshape(pages.shape)

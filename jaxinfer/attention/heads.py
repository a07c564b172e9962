"""What becomes of a layer's projected heads before attention: norms of queries and keys, and their rotation."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from kernels_pallas.parts import Parts, whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProjectedHeads:
    """A layer's queries, keys and values as they come from the projection, with all that they still need.

    `rotated` says in plain XLA what that is; a kernel may do the same in one go (see `AttentionBackend`).
    """

    qkv: jax.Array | Parts  # [..., T, num_kv_heads, group + 2, head_dim]: a KV head's queries, its key, its value
    cos: jax.Array  # float32 [..., T, head_dim / 2]
    sin: jax.Array  # float32 [..., T, head_dim / 2]
    q_scale: jax.Array | None  # [head_dim], of the RMS norm of each head; None: no norms
    k_scale: jax.Array | None  # [head_dim]
    eps: float = field(metadata={"static": True})  # of the norms

    def rotated(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [..., T, num_heads, head_dim], normalised and rotated; k likewise and v, with num_kv_heads heads."""
        qkv = whole(self.qkv)
        *lead, kv_heads, width, dim = qkv.shape
        group = width - 2
        q = qkv[..., :group, :].reshape(*lead, kv_heads * group, dim)
        k, v = qkv[..., group, :], qkv[..., group + 1, :]
        if self.q_scale is not None and self.k_scale is not None:
            q, k = rms_norm(q, self.q_scale, self.eps), rms_norm(k, self.k_scale, self.eps)
        return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32 (Zhang and Sennrich 2019); x's dtype out."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    # The product with the scale is taken in x's dtype, as in the checkpoints' reference implementations.
    return scale * normed.astype(x.dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the halves of x [..., heads, head_dim] by cos, sin [..., head_dim / 2]; float32 inside, x's dtype out."""
    dtype = x.dtype
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(dtype)

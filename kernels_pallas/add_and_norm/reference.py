"""Residual add and RMS norm in plain XLA: the kernel's reference, and the fallback where the kernel cannot run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.parts import Parts, whole


def add_and_norm(
    x: jax.Array, y: jax.Array | Parts, scale: jax.Array, eps: float, *, axis: int = -1
) -> tuple[jax.Array, jax.Array]:
    """Return the residual stream x plus a layer's result y, and the RMS norm of the sum over `axis`."""
    x = x + whole(y)
    return x, rms_norm(x, scale, eps, axis=axis)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, *, axis: int = -1) -> jax.Array:
    """Return x / rms(x) * scale [N] over `axis`, of size N, in float32 (Zhang and Sennrich 2019); x's dtype out."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + eps)
    # The product with the scale is taken in x's dtype, as in the checkpoints' reference implementations.
    return jnp.expand_dims(scale, tuple(range(1, x.ndim - axis % x.ndim))) * normed.astype(x.dtype)

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
    """Return x / rms(x) * scale [N] over `axis`, of size N, in float32 (Zhang and Sennrich 2019); x's dtype out.

    The dtype of the scale decides where the result is rounded to x's dtype: after the product with a float32 scale,
    before the product with any other.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + eps)
    # Both ways are those of the checkpoints' reference implementations; families differ.
    factor = jnp.expand_dims(scale, tuple(range(1, x.ndim - axis % x.ndim)))
    return (factor * normed).astype(x.dtype) if scale.dtype == jnp.float32 else factor * normed.astype(x.dtype)

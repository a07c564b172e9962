"""The same in plain XLA: the truth for the kernel, and what runs where no kernel does."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.parts import Parts, whole


def add_and_norm(x: jax.Array, y: jax.Array | Parts, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """The residual stream x [..., N] with a layer's result y added, and the RMS norm of that."""
    x = x + whole(y)
    return x, rms_norm(x, scale, eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32 (Zhang and Sennrich 2019); x's dtype out."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    # The product with the scale is taken in x's dtype, as in the checkpoints' reference implementations.
    return scale * normed.astype(x.dtype)

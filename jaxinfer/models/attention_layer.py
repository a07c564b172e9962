"""Grouped-query attention of a layer: projections, norms of heads, gates and sinks; `attend` does what is between."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.attend import Attend, LayerKV
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layer_config import LayerConfig
from jaxinfer.models.layers import Projection, RMSNorm
from kernels_pallas.parts import Parts, whole


class Rotation(NamedTuple):
    """Rotation of the tokens of a step in the layers of one kind, see `rope_cos_sin`."""

    cos: jax.Array  # float32 [..., T, head_dim / 2]
    sin: jax.Array  # float32 [..., T, head_dim / 2]
    query_factor: jax.Array | None = None  # float32 [..., T], of queries; None: 1


class HeadsNorm(nnx.Module):
    """Scale of the norm over all heads, [num_kv_heads, group, head_dim] of queries or [num_kv_heads, head_dim]."""

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(shape, dtype))


class Attention(nnx.Module):
    """Grouped-query attention with fused q, k, v.

    Args:
        layer: heads, rotation and window of this layer.
        inputs: number of input features; None: `hidden_size`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        inputs: int | None = None,
    ) -> None:
        heads, group, dim = layer.num_kv_heads, layer.group_size, layer.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        scale_dtype = jnp.dtype(jnp.float32) if config.float32_norms else dtype
        self.head_shape = (heads, group, dim)
        # Not the whole description: layers that differ in their rotation alone share a trace.
        self.eps, self.window, self.values_are_keys = eps, layer.window, layer.values_are_keys
        self.scale, self.cap = config.attention_scale, config.score_cap
        self.norms_late = config.qk_norm_of == "rotated_head"
        self.has_v_norm, self.q_factor = config.v_norm, config.q_factor
        self.has_constant_norm = config.qk_norm and not config.qk_norm_has_weights
        self.gate_act = config.gate
        self.has_kv, self.keeps_kv = layer.kv_from is None, layer.is_read_later
        slots = group + (0 if not self.has_kv else 1 if layer.values_are_keys else 2)
        self.qkv = Projection((inputs or hidden,), (heads, slots, dim), bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Projection(self.head_shape, (hidden,), bias=config.o_bias, dtype=dtype, rngs=rngs)
        has_scales, over_all = config.qk_norm and config.qk_norm_has_weights, config.qk_norm_of == "all_heads"

        def norm(shape: tuple[int, ...]) -> HeadsNorm | RMSNorm:
            return HeadsNorm(shape, scale_dtype) if over_all else RMSNorm(dim, eps, scale_dtype)

        self.q_norm = norm(self.head_shape) if has_scales else None
        self.k_norm = norm((heads, dim)) if has_scales and self.has_kv else None
        gate_shape = (heads, group) if config.gate_of == "head" else self.head_shape
        self.gate = (
            None if config.gate == "none" else Projection((hidden,), gate_shape, bias=False, dtype=dtype, rngs=rngs)
        )
        self.sinks = nnx.Param(jnp.zeros((heads, group), dtype)) if config.has_sinks else None

    def __call__(
        self, x: jax.Array, kv: LayerKV, rotation: Rotation, attend: Attend, residual: Residual
    ) -> tuple[jax.Array | Parts, LayerKV]:
        qkv = self.qkv.in_parts(x, residual)
        qkv = qkv if isinstance(qkv, Parts) else residual.to_tokens(qkv)
        qkv, scales = self._prepared(qkv, rotation)
        heads = ProjectedHeads(
            qkv,
            rotation.cos,
            rotation.sin,
            q_scale=scales[0],
            k_scale=scales[1],
            eps=self.eps,
            norms_late=self.norms_late,
            scale=self.scale,
            cap=self.cap,
            window=self.window,
            has_kv=self.has_kv,
            keeps_kv=self.keeps_kv,
            sinks=None if self.sinks is None else self.sinks[...].reshape(-1),
        )
        found, kv = attend(kv, heads)
        heads_apart = found.reshape(*found.shape[:-2], *self.head_shape)
        if self.gate is not None:
            heads_apart = self._gated(heads_apart, residual.to_tokens(self.gate(x, residual)))
        return self.o.in_parts(residual.from_tokens(heads_apart), residual), kv

    def _prepared(
        self, qkv: jax.Array | Parts, rotation: Rotation
    ) -> tuple[jax.Array | Parts, tuple[jax.Array | None, jax.Array | None]]:
        """Return projected heads [..., T, num_kv_heads, group + 2, head_dim], and the scales of the norms that are left
        to the rotation's code.

        Norms over all heads, norms of values and growth of queries are computed here: the first need all devices that
        share a model, the others are in few families.
        """
        dim, group = self.head_shape[-1], self.head_shape[1]
        scales: tuple[jax.Array | None, jax.Array | None] = (None, None)
        if self.has_constant_norm:
            scales = jnp.full(dim, self.q_factor, jnp.float32), jnp.ones(dim, jnp.float32)
        elif isinstance(self.q_norm, RMSNorm):
            scales = self.q_norm.scale[...], None if self.k_norm is None else self.k_norm.scale[...]
        if not self.has_kv:
            return qkv, scales
        over_all = isinstance(self.q_norm, HeadsNorm)
        if not (over_all or self.has_v_norm or self.values_are_keys or rotation.query_factor is not None):
            return qkv, scales
        qkv = whole(qkv)
        q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., -1, :]
        if isinstance(self.q_norm, HeadsNorm) and isinstance(self.k_norm, HeadsNorm):
            q, k = (_over_heads(x, norm.scale[...], self.eps) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        if rotation.query_factor is not None:
            q = (q * rotation.query_factor[..., None, None, None].astype(q.dtype)).astype(q.dtype)
        if self.has_v_norm:
            v = _normed(v, self.eps, (-1,))
        return jnp.concatenate([q, k[..., None, :], v[..., None, :]], axis=-2), scales

    def _gated(self, heads: jax.Array, gate: jax.Array) -> jax.Array:
        """Multiply attention's result [..., num_kv_heads, group, head_dim] with the gate of each element or head."""
        gate = gate.astype(jnp.float32)
        factor = (jax.nn.sigmoid(gate) if self.gate_act == "sigmoid" else jax.nn.softplus(gate)).astype(heads.dtype)
        return heads * (factor if factor.ndim == heads.ndim else factor[..., None])


def _normed(x: jax.Array, eps: float, axes: tuple[int, ...]) -> jax.Array:
    """Return x / rms(x) over some axes, in float32; x's dtype out."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)).astype(x.dtype)


def _over_heads(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Return the RMS norm of x [..., T, *scale.shape] over all axes that the scale has, rounded as `rms_norm` does."""
    axes = tuple(range(-scale.ndim, 0))
    if scale.dtype == x.dtype:
        return _normed(x, eps, axes) * scale
    return (_normed(x.astype(jnp.float32), eps, axes) * scale).astype(x.dtype)

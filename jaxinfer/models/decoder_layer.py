"""One decoder layer, traced once for all layers of its kind."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.attend import Attend, LayerKV
from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts import SparseMLP
from jaxinfer.models.layers import MLP, Attention, RMSNorm
from kernels_pallas.parts import Parts


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, or experts, each with its residual.

    A layer is traced and lowered once for all layers of its kind: its computation is jitted by itself, with its weights
    and its keys and values as arguments. XLA compiles as if each layer were written out.
    """

    def __init__(self, config: ModelConfig, number: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = SparseMLP(config, dtype, rngs) if config.is_sparse(number) else MLP(config, dtype, rngs)

    def enter(self, x: jax.Array, y: jax.Array | Parts | None, residual: Residual) -> tuple[jax.Array, jax.Array]:
        """Return this layer's input, the residual stream x plus the previous layer's result y, and its norm."""
        # Jitted separately, because the first layer has no y; the rest is the same in every layer.
        return _enter(self.input_norm, x, y, residual)

    def __call__(
        self,
        x: jax.Array,
        normed: jax.Array,
        kv: LayerKV,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
        residual: Residual,
    ) -> tuple[jax.Array, jax.Array | Parts, LayerKV]:
        """Map the results of `enter` and the layer's KV to the residual stream, the layer's result, and the new KV."""
        return _attend_and_project(self, x, normed, kv, cos, sin, attend, residual)


@partial(jax.jit, static_argnames="residual")
def _enter(norm: RMSNorm, x: jax.Array, y: jax.Array | Parts | None, residual: Residual) -> tuple[jax.Array, jax.Array]:
    return norm.after(x, y, residual)


@partial(jax.jit, static_argnames="residual")
def _attend_and_project(
    layer: DecoderLayer,
    x: jax.Array,
    normed: jax.Array,
    kv: LayerKV,
    cos: jax.Array,
    sin: jax.Array,
    attend: Attend,
    residual: Residual,
) -> tuple[jax.Array, jax.Array | Parts, LayerKV]:
    y, kv = layer.attention(normed, kv, cos, sin, attend, residual)
    x, normed = layer.post_attention_norm.after(x, y, residual)
    return x, layer.mlp(normed, residual), kv

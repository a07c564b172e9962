"""One decoder layer, traced once for all layers of its kind."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.attend import Attend, LayerKV
from jaxinfer.attention.residual import Residual
from jaxinfer.models.attention_layer import Attention, Rotation
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts import ExpertsBesideMLP, SparseMLP
from jaxinfer.models.layers import MLP, RMSNorm, scaled
from jaxinfer.models.per_layer import PerLayerGate
from kernels_pallas.parts import Parts, whole


class LayerScalar(nnx.Module):
    """A weight [1] that a layer's whole output is multiplied with."""

    def __init__(self, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(1, dtype))


class DecoderLayer(nnx.Module):
    """Attention and MLP, or experts, each with its residual; norms before them, after them, or both.

    A layer is traced and lowered once for all layers of its kind: its computation is jitted by itself, with its weights
    and its keys and values as arguments. XLA compiles as if each layer were written out.
    """

    def __init__(self, config: ModelConfig, number: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        is_before, is_after = config.norms != "after", config.norms != "before"
        self.input_norm = RMSNorm.of(config, dtype) if is_before else None
        self.attention = Attention(config, config.layer(number), dtype, rngs)
        self.attention_result_norm = RMSNorm.of(config, dtype, eps=config.post_norm_eps) if is_after else None
        self.post_attention_norm = RMSNorm.of(config, dtype) if is_before else None
        is_sparse, is_beside = config.is_sparse(number), config.experts is not None and config.experts.is_beside_mlp
        inner = config.layer(number).mlp_size
        self.mlp = SparseMLP(config, dtype, rngs) if is_sparse and not is_beside else MLP(config, dtype, rngs, inner)
        self.beside = ExpertsBesideMLP(config, dtype, rngs) if is_sparse and is_beside else None
        self.mlp_result_norm = RMSNorm.of(config, dtype, eps=config.post_norm_eps) if is_after else None
        self.scalar = LayerScalar(dtype) if config.has_layer_scalar else None
        self.per_layer = PerLayerGate(config, dtype, rngs) if config.per_layer_size else None
        self.residual_scale = config.residual_scale

    def enter(self, x: jax.Array, y: jax.Array | Parts | None, residual: Residual) -> tuple[jax.Array, jax.Array]:
        """Return this layer's input, the residual stream x plus the previous layer's result y, and its norm."""
        # Jitted separately, because the first layer has no y; the rest is the same in every layer.
        return _enter(self.input_norm, x, y, residual)

    def __call__(
        self,
        x: jax.Array,
        normed: jax.Array,
        kv: LayerKV,
        rotation: Rotation,
        attend: Attend,
        residual: Residual,
        own: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | Parts | None, LayerKV]:
        """Map the results of `enter` and the layer's KV to the residual stream, the layer's result, and the new KV.

        The result is None where the residual stream has it already.

        Args:
            own: the layer's own input, see `PerLayerEmbeddings`, in the layout of activations.
        """
        return _attend_and_project(self, x, normed, kv, rotation, attend, residual, own)


@partial(jax.jit, static_argnames="residual")
def _enter(
    norm: RMSNorm | None, x: jax.Array, y: jax.Array | Parts | None, residual: Residual
) -> tuple[jax.Array, jax.Array]:
    if norm is not None:
        return norm.after(x, y, residual)
    x = x if y is None else x + whole(y)
    return x, x


@partial(jax.jit, static_argnames="residual")
def _attend_and_project(
    layer: DecoderLayer,
    x: jax.Array,
    normed: jax.Array,
    kv: LayerKV,
    rotation: Rotation,
    attend: Attend,
    residual: Residual,
    own: jax.Array | None,
) -> tuple[jax.Array, jax.Array | Parts | None, LayerKV]:
    y, kv = layer.attention(normed, kv, rotation, attend, residual)
    y = _result(layer, layer.attention_result_norm, y, residual)
    x, normed = _enter(layer.post_attention_norm, x, y, residual)
    y = layer.mlp(normed, residual)
    if layer.beside is not None:
        y = layer.beside(x, whole(y), residual)
    y = _result(layer, layer.mlp_result_norm, y, residual)
    if layer.scalar is None and layer.per_layer is None:
        return x, y, kv
    x = x + whole(y)
    if layer.per_layer is not None and own is not None:
        x = layer.per_layer(x, own, residual)
    return x if layer.scalar is None else x * layer.scalar.scale[...], None, kv


def _result(layer: DecoderLayer, norm: RMSNorm | None, y: jax.Array | Parts, residual: Residual) -> jax.Array | Parts:
    """Return what attention or MLP adds to the residual stream, given its result."""
    if norm is not None:
        y = norm(whole(y), residual)
    return y if layer.residual_scale == 1.0 else scaled(whole(y), layer.residual_scale)

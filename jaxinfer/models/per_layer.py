"""Embeddings that each token has for each layer, beside the one that enters the first (Gemma 3n and Gemma 4 E2B)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layers import ACTIVATIONS, Projection, RMSNorm, normal, scaled
from kernels_pallas.add_and_norm.reference import rms_norm


class PerLayerEmbeddings(nnx.Module):
    """The inputs [..., T, layers, width] of all layers: from a table by token, and projected from the embedding."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, layers, hidden = config.per_layer_size, config.num_layers, config.hidden_size
        self.table = nnx.Param(normal(rngs, (config.vocab_size, layers, width), width, dtype))
        self.projection = Projection((hidden,), (layers, width), bias=False, dtype=dtype, rngs=rngs)
        kept = jnp.dtype(jnp.float32) if config.float32_norms else dtype
        self.norm = RMSNorm(width, config.rms_norm_eps, kept)

    def __call__(self, token_ids: jax.Array, embeddings: jax.Array) -> jax.Array:
        of_tokens = jnp.take(self.table[...], token_ids, axis=0)
        of_tokens = of_tokens * jnp.asarray(of_tokens.shape[-1] ** 0.5, of_tokens.dtype)
        projected = scaled(self.projection(embeddings), embeddings.shape[-1] ** -0.5)
        return scaled(rms_norm(projected, self.norm.scale[...], self.norm.eps) + of_tokens, 2**-0.5)


class PerLayerGate(nnx.Module):
    """Adds a layer's own input to the residual stream: norm(projection(act(gate(x)) * input))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, width = config.hidden_size, config.per_layer_size
        self.gate = Projection((hidden,), (width,), bias=False, dtype=dtype, rngs=rngs)
        self.projection = Projection((width,), (hidden,), bias=False, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm.of(config, dtype)
        self.act = config.hidden_act

    def __call__(self, x: jax.Array, own: jax.Array, residual: Residual) -> jax.Array:
        """Return the residual stream x with a layer's own input, [..., T, width] in the layout of activations."""
        gated = ACTIVATIONS[self.act](self.gate(x, residual)) * own
        return x + self.norm(self.projection(gated, residual), residual)

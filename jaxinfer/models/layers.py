"""The layers that every decoder family shares: norms, fused projections, attention and gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.attend import Attend
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import apply_rope

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        # The product with the scale is taken in x's dtype, as in the checkpoints' reference implementations.
        return self.scale[...] * normed.astype(x.dtype)


class Projection(nnx.Module):
    """x [..., *inputs] @ kernel [*inputs, *outputs] + bias [*outputs]: a linear map with structured axes."""

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        fan_in = 1
        for size in inputs:
            fan_in *= size
        self.kernel = nnx.Param(_normal(rngs, (*inputs, *outputs), fan_in, dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.num_inputs = len(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        lead = x.shape[: x.ndim - self.num_inputs]
        inputs, outputs = kernel.shape[: self.num_inputs], kernel.shape[self.num_inputs :]
        size = 1
        for extent in inputs:
            size *= extent
        y = (x.reshape(*lead, size) @ kernel.reshape(size, -1)).reshape(*lead, *outputs)
        return y if self.bias is None else y + self.bias[...]


class Attention(nnx.Module):
    """Grouped-query attention with fused q, k, v; the visible past is the business of `attend`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
        self.group = group
        self.qkv = Projection(
            (config.hidden_size,), (heads, group + 2, dim), bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.o = Projection((heads, group, dim), (config.hidden_size,), bias=config.o_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def __call__(self, layer: int, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend) -> jax.Array:
        qkv = self.qkv(x)  # [..., Hkv, G + 2, D]
        lead, heads, dim = qkv.shape[:-3], qkv.shape[-3], qkv.shape[-1]
        q = qkv[..., : self.group, :].reshape(*lead, heads * self.group, dim)
        k, v = qkv[..., self.group, :], qkv[..., self.group + 1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(layer, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        return self.o(out.reshape(*lead, heads, self.group, dim))


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Projection((hidden,), (2, inner), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Projection((inner,), (hidden,), bias=bias, dtype=dtype, rngs=rngs)
        self.act = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up(x)
        return self.down(ACTIVATIONS[self.act](gate_up[..., 0, :]) * gate_up[..., 1, :])


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, layer: int, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend) -> jax.Array:
        x = x + self.attention(layer, self.input_norm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_norm(x))


class Embedding(nnx.Module):
    """A table [vocab, hidden] read by token id, or, as an output head, multiplied with."""

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(_normal(rngs, (vocab, hidden), hidden, dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], token_ids, axis=0)


class OutputHead(nnx.Module):
    """logits = hidden @ kernel^T with kernel [vocab, hidden], the layout of the checkpoints."""

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(_normal(rngs, (vocab, hidden), hidden, dtype))

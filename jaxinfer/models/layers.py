"""The layers that every decoder family shares: norms, fused projections, attention and gated MLP."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.attend import Attend
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from kernels_pallas.add_and_norm.reference import rms_norm
from kernels_pallas.parts import Parts

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
    """See `rms_norm`."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)

    def after(self, x: jax.Array, y: jax.Array | Parts | None, residual: Residual) -> tuple[jax.Array, jax.Array]:
        """The residual stream x with the result y added, if there is one yet, and the norm of that."""
        return (x, self(x)) if y is None else residual.add_and_norm(x, y, self.scale[...], self.eps)


class Projection(nnx.Module):
    """x [..., *inputs] @ kernel [*inputs, *outputs] + bias [*outputs]: a linear map with structured axes."""

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(_normal(rngs, (*inputs, *outputs), math.prod(inputs), dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.num_inputs = len(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Over the axes as they are: merged, one that is split over devices behind one that is not would be gathered.
        y = jnp.tensordot(x, self.kernel[...], axes=self.num_inputs)
        return y if self.bias is None else y + self.bias[...]

    def in_parts(self, x: jax.Array, choose: Callable[[int, int, int], int]) -> jax.Array | Parts:
        """The same of x [T, *inputs], cut into as many parts as `choose` says of (T, inputs, outputs)."""
        kernel = self.kernel[...]
        inputs, outputs = kernel.shape[: self.num_inputs], kernel.shape[self.num_inputs :]
        inner, columns = math.prod(inputs), math.prod(outputs)
        parts = choose(x.shape[0], inner, columns)
        if parts == 1:
            return self(x)
        y = jnp.einsum(
            "tpk,pkn->ptn",
            x.reshape(-1, parts, inner // parts),
            kernel.reshape(parts, inner // parts, columns),
            preferred_element_type=jnp.float32,
        )
        return Parts(y.reshape(parts, -1, *outputs), None if self.bias is None else self.bias[...], x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with fused q, k, v; all between the projections is the business of `attend`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
        self.head_shape = (heads, group, dim)
        self.eps = config.rms_norm_eps
        self.qkv = Projection(
            (config.hidden_size,), (heads, group + 2, dim), bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.o = Projection(self.head_shape, (config.hidden_size,), bias=config.o_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def __call__(
        self, layer: int, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, residual: Residual
    ) -> jax.Array | Parts:
        heads = ProjectedHeads(
            self.qkv.in_parts(x, residual.parts),
            cos,
            sin,
            q_scale=None if self.q_norm is None else self.q_norm.scale[...],
            k_scale=None if self.k_norm is None else self.k_norm.scale[...],
            eps=self.eps,
        )
        return self.o.in_parts(attend(layer, heads).reshape(*x.shape[:-1], *self.head_shape), residual.parts)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Projection((hidden,), (2, inner), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Projection((inner,), (hidden,), bias=bias, dtype=dtype, rngs=rngs)
        self.act = config.hidden_act

    def __call__(self, x: jax.Array, residual: Residual) -> jax.Array | Parts:
        gate_up = self.gate_up(x)
        return self.down.in_parts(ACTIVATIONS[self.act](gate_up[..., 0, :]) * gate_up[..., 1, :], residual.parts)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self,
        layer: int,
        x: jax.Array,
        y: jax.Array | Parts | None,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
        residual: Residual,
    ) -> tuple[jax.Array, jax.Array | Parts]:
        """The residual stream x and the result y of the layer before it -> the same of this layer."""
        x, normed = self.input_norm.after(x, y, residual)
        y = self.attention(layer, normed, cos, sin, attend, residual)
        x, normed = self.post_attention_norm.after(x, y, residual)
        return x, self.mlp(normed, residual)


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

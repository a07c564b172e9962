"""The layers that every decoder family shares: norms, fused projections, gated MLP, embeddings and output head."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.attention.residual import PLAIN, Residual
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


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype) -> jax.Array:
    """Random weights, scaled so that sums of `fan_in` products keep the magnitude of their inputs."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply x by a constant, which is not rounded to x's dtype."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS norm with a learned scale, see `rms_norm`."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    @classmethod
    def of(cls, config: ModelConfig, dtype: jnp.dtype, *, eps: float | None = None) -> RMSNorm:
        """Return a norm of hidden states, with the scale's dtype and epsilon that the configuration asks for."""
        kept = jnp.dtype(jnp.float32) if config.float32_norms else dtype
        return cls(config.hidden_size, config.rms_norm_eps if eps is None else eps, kept)

    def __call__(self, y: jax.Array, residual: Residual) -> jax.Array:
        """Return the norm of y alone."""
        return rms_norm(y, self.scale[...], self.eps, axis=residual.features_axis)

    def after(self, x: jax.Array, y: jax.Array | Parts | None, residual: Residual) -> tuple[jax.Array, jax.Array]:
        """Return the residual stream x plus the result y, or x alone if y is None, and its norm."""
        if y is None:
            return x, rms_norm(x, self.scale[...], self.eps, axis=residual.features_axis)
        return residual.add_and_norm(x, y, self.scale[...], self.eps)


class Projection(nnx.Module):
    """x [..., *inputs] -> kernel [*outputs, *inputs] x + bias [*outputs]: a linear map with structured axes.

    The kernel has the checkpoints' layout. A sharded axis is the first of its side, so that the axes of a side can be
    merged without an all-gather.
    """

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(normal(rngs, (*outputs, *inputs), math.prod(inputs), dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.inputs, self.outputs = inputs, outputs

    def __call__(self, x: jax.Array, residual: Residual = PLAIN) -> jax.Array:
        """Map x [..., *inputs] to [..., *outputs]; with features first, x [*inputs, T] to [*outputs, T]."""
        kernel, bias = self.kernel[...].reshape(math.prod(self.outputs), -1), self.bias
        if residual.features_first:
            y = jnp.dot(kernel, x.reshape(kernel.shape[1], -1)).reshape(*self.outputs, -1)
            return y if bias is None else y + bias[...][..., None]
        lead = x.shape[: x.ndim - len(self.inputs)]
        y = jnp.einsum("...i,oi->...o", x.reshape(*lead, -1), kernel).reshape(*lead, *self.outputs)
        return y if bias is None else y + bias[...]

    def in_parts(self, x: jax.Array, residual: Residual) -> jax.Array | Parts:
        """Project x [T, *inputs] into unsummed `Parts`, as many as `residual` says; for one part, return `self(x)`."""
        inner, columns = math.prod(self.inputs), math.prod(self.outputs)
        parts = residual.parts(x.shape[0], inner, columns)
        if parts == 1:
            return self(x, residual)
        y = jnp.einsum(
            "tpi,opi->pto",
            x.reshape(-1, parts, inner // parts),
            self.kernel[...].reshape(columns, parts, inner // parts),
            preferred_element_type=jnp.float32,
        )
        return Parts(y.reshape(parts, -1, *self.outputs), None if self.bias is None else self.bias[...], x.dtype)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one matrix.

    Args:
        inner: intermediate features; None: `intermediate_size`.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, inner: int | None = None) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        inner = inner or config.intermediate_size
        self.gate_up = Projection((hidden,), (inner, 2), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Projection((inner,), (hidden,), bias=bias, dtype=dtype, rngs=rngs)
        self.act = config.hidden_act

    def __call__(self, x: jax.Array, residual: Residual) -> jax.Array | Parts:
        gate_up = self.gate_up(x, residual)
        gate, up = (lax.index_in_dim(gate_up, i, residual.features_axis, keepdims=False) for i in range(2))
        return self.down.in_parts(ACTIVATIONS[self.act](gate) * up, residual)


class Embedding(nnx.Module):
    """A table [vocab, hidden] read by token id, or multiplied with as a tied output head."""

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(normal(rngs, (vocab, hidden), hidden, dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], token_ids, axis=0)


class OutputHead(nnx.Module):
    """logits = hidden @ kernel^T with kernel [vocab, hidden], the layout of the checkpoints."""

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(normal(rngs, (vocab, hidden), hidden, dtype))

"""Mixtures of experts: routing of tokens to experts, and the weighted sum of the experts' outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.layers import ACTIVATIONS, MLP, Projection, RMSNorm, normal, scaled
from kernels_pallas.add_and_norm.reference import rms_norm
from kernels_pallas.grouped_matmul.reference import at_places, group_rows, grouped_matmul
from kernels_pallas.parts import whole


def choose_experts(
    logits: jax.Array, config: ExpertsConfig, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the experts int32 [T, k] of T tokens and their weights float32 [T, k], from a router's logits float32
    [T, E].

    Experts are chosen by score plus bias, and weighted by score alone. With groups, they are chosen from the groups
    whose two best experts have the highest sum.

    Source: Ling 2.0 (inclusionAI 2025), whose router is DeepSeek-V3's (2024).
    """
    if config.logit_cap is not None:
        logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
    scores = jax.nn.softmax(logits, axis=-1) if config.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    if config.num_groups:
        by_group = ranked.reshape(-1, config.num_groups, ranked.shape[-1] // config.num_groups)
        _, kept = lax.top_k(jnp.sum(lax.top_k(by_group, 2)[0], axis=-1), config.kept_groups)
        is_kept = jnp.any(kept[:, :, None] == jnp.arange(config.num_groups), axis=1)
        # Not 0, because a score with a negative bias can be below 0.
        ranked = jnp.where(is_kept[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)
    _, experts = lax.top_k(ranked, config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalizes:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * config.scaling


class ExpertKernels(nnx.Module):
    """Kernels [E, *outputs, inputs] of E experts, and biases [E, *outputs] if they have some."""

    def __init__(
        self, num_experts: int, outputs: tuple[int, ...], inputs: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool
    ) -> None:
        self.kernel = nnx.Param(normal(rngs, (num_experts, *outputs, inputs), inputs, dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts, *outputs), dtype)) if bias else None


class Router(nnx.Module):
    """Router: scores every expert for every token and chooses experts."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        self.kernel = nnx.Param(normal(rngs, (config.num_experts, hidden_size), hidden_size, dtype))
        self.bias = nnx.Param(jnp.zeros(config.num_experts, jnp.float32)) if config.has_bias else None
        self.logit_bias = nnx.Param(jnp.zeros(config.num_experts, dtype)) if config.has_logit_bias else None

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `choose_experts` for tokens [T, hidden]; logits are float32 products whatever the weights' dtype."""
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.einsum("th,eh->te", tokens.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias[...].astype(jnp.float32)
        return choose_experts(logits, self.config, None if self.bias is None else self.bias[...])


class Experts(nnx.Module):
    """The experts themselves: the weighted sum of those that were chosen for each token."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        experts, hidden = config.experts, config.hidden_size
        inner, bias = experts.intermediate_size, experts.has_expert_biases
        self.gate_up = ExpertKernels(experts.num_experts, (inner, 2), hidden, dtype, rngs, bias=bias)
        self.down = ExpertKernels(experts.num_experts, (hidden,), inner, dtype, rngs, bias=bias)
        self.act, self.limit, self.slope = config.hidden_act, experts.gate_limit, experts.gate_slope

    def mixture(self, tokens: jax.Array, experts: jax.Array, weights: jax.Array, residual: Residual) -> jax.Array:
        """Return the mixture float32 [T, hidden] for tokens [T, hidden], experts int32 [T, k] and their weights."""
        split = (self.gate_up.kernel, self.down.kernel, *([] if self.gate_up.bias is None else [self.gate_up.bias]))
        total = residual.over_experts(self._mixture, (tokens, experts, weights), *(x[...] for x in split))
        if self.down.bias is None:
            return total
        # Once, not on each device that has a share of the experts.
        return total + jnp.einsum("tk,tkh->th", weights, self.down.bias[...][experts].astype(jnp.float32))

    def _mixture(
        self,
        tokens: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        gate_up_bias: jax.Array | None = None,
    ) -> jax.Array:
        """Return the mixture for kernels [E, f, 2, hidden], [E, hidden, f] and biases [E, f, 2]; without last ones."""
        num_experts, inner, _, hidden = gate_up.shape
        groups = group_rows(experts.reshape(-1), num_experts)
        rows = at_places(tokens, groups, copies=experts.shape[1])
        found = grouped_matmul(rows, gate_up.reshape(num_experts, -1, hidden), groups).reshape(-1, inner, 2)
        if gate_up_bias is not None:
            found = found + gate_up_bias[jnp.repeat(groups.group, groups.block_rows)]
        gated = self._gated(found[..., 0], found[..., 1])
        outputs = grouped_matmul(gated, down, groups)[groups.place].reshape(*experts.shape, hidden)
        return jnp.einsum("tk,tkh->th", weights, outputs.astype(jnp.float32))

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.limit is None:
            return ACTIVATIONS[self.act](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(scaled(gate, self.slope)))


class SparseMLP(Experts):
    """The weighted sum of the experts that a router chooses for each token, plus a shared expert if there is one."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype, rngs)
        experts = config.experts
        assert experts is not None
        self.router = Router(experts, config.hidden_size, dtype, rngs)
        self.shared = MLP(config, dtype, rngs, experts.shared_size) if experts.shared_size else None
        self.shared_gate = (
            Projection((config.hidden_size,), (1,), bias=False, dtype=dtype, rngs=rngs)
            if experts.shared_is_gated
            else None
        )

    def __call__(self, x: jax.Array, residual: Residual) -> jax.Array:
        tokens = residual.to_tokens(x)
        # Experts see tokens only, so the axes before them are merged.
        flat = tokens.reshape(-1, tokens.shape[-1])
        total = self.mixture(flat, *self.router(flat), residual)
        y = residual.from_tokens(total.astype(tokens.dtype).reshape(tokens.shape))
        if self.shared is None:
            return y
        shared = whole(self.shared(x, residual))
        if self.shared_gate is not None:
            shared = jax.nn.sigmoid(self.shared_gate(x, residual)) * shared
        return y + shared


class RouterScales(nnx.Module):
    """Scales of a router: of what it reads, [hidden], and of each expert's weight, [E]."""

    def __init__(self, hidden_size: int, num_experts: int, dtype: jnp.dtype) -> None:
        self.inputs = nnx.Param(jnp.ones(hidden_size, dtype))
        self.experts = nnx.Param(jnp.ones(num_experts, dtype))


class ExpertsBesideMLP(Experts):
    """Experts beside a plain MLP, which read the residual stream itself; both results are normed and summed.

    The router reads the residual stream, normed without weights, times a learned scale and hidden ** -0.5; each
    expert's weight has a learned factor.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype, rngs)
        experts = config.experts
        assert experts is not None
        self.eps = config.rms_norm_eps
        self.router = Router(experts, config.hidden_size, dtype, rngs)
        self.scales = RouterScales(config.hidden_size, experts.num_experts, dtype)
        self.input_norm = RMSNorm.of(config, dtype)
        self.result_norm = RMSNorm.of(config, dtype)
        self.mlp_result_norm = RMSNorm.of(config, dtype)

    def __call__(self, x: jax.Array, of_mlp: jax.Array, residual: Residual) -> jax.Array:
        """Return the sum of both results, given the residual stream x and the result of the MLP."""
        tokens = residual.to_tokens(x)
        flat = tokens.reshape(-1, tokens.shape[-1])
        read = scaled(rms_norm(flat, self.scales.inputs[...], self.eps), flat.shape[-1] ** -0.5)
        experts, weights = self.router(read)
        weights = weights * self.scales.experts[...][experts].astype(jnp.float32)
        inner = rms_norm(flat, self.input_norm.scale[...], self.eps)
        total = self.mixture(inner, experts, weights, residual)
        y = residual.from_tokens(total.astype(tokens.dtype).reshape(tokens.shape))
        return self.mlp_result_norm(of_mlp, residual) + self.result_norm(y, residual)

"""Mixtures of experts: routing of tokens to experts, and the weighted sum of the experts' outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.attention.residual import Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.layers import ACTIVATIONS, MLP, normal
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
    """Kernels [E, *outputs, inputs] of E experts."""

    def __init__(
        self, num_experts: int, outputs: tuple[int, ...], inputs: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.kernel = nnx.Param(normal(rngs, (num_experts, *outputs, inputs), inputs, dtype))


class Router(nnx.Module):
    """Router: scores every expert for every token and chooses experts."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        self.kernel = nnx.Param(normal(rngs, (config.num_experts, hidden_size), hidden_size, dtype))
        self.bias = nnx.Param(jnp.zeros(config.num_experts, jnp.float32)) if config.has_bias else None

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `choose_experts` for tokens [T, hidden]; logits are float32 products whatever the weights' dtype."""
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.einsum("th,eh->te", tokens.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        return choose_experts(logits, self.config, None if self.bias is None else self.bias[...])


class SparseMLP(nnx.Module):
    """The weighted sum of the experts that a router chooses for each token, plus a shared expert if there is one."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        experts, hidden = config.experts, config.hidden_size
        inner = experts.intermediate_size
        self.router = Router(experts, hidden, dtype, rngs)
        self.gate_up = ExpertKernels(experts.num_experts, (inner, 2), hidden, dtype, rngs)
        self.down = ExpertKernels(experts.num_experts, (hidden,), inner, dtype, rngs)
        self.shared = MLP(config, dtype, rngs, experts.shared_size) if experts.shared_size else None
        self.act = config.hidden_act

    def __call__(self, x: jax.Array, residual: Residual) -> jax.Array:
        tokens = residual.to_tokens(x)
        # Experts see tokens only, so the axes before them are merged.
        flat = tokens.reshape(-1, tokens.shape[-1])
        experts, weights = self.router(flat)
        total = residual.over_experts(
            self._mixture, (flat, experts, weights), self.gate_up.kernel[...], self.down.kernel[...]
        )
        y = residual.from_tokens(total.astype(tokens.dtype).reshape(tokens.shape))
        return y if self.shared is None else y + whole(self.shared(x, residual))

    def _mixture(
        self, tokens: jax.Array, experts: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """Return the mixture float32 [T, hidden] for tokens [T, hidden]; kernels [E, f, 2, hidden], [E, hidden, f]."""
        num_experts, inner, _, hidden = gate_up.shape
        groups = group_rows(experts.reshape(-1), num_experts)
        rows = at_places(tokens, groups, copies=experts.shape[1])
        found = grouped_matmul(rows, gate_up.reshape(num_experts, -1, hidden), groups).reshape(-1, inner, 2)
        gated = ACTIVATIONS[self.act](found[..., 0]) * found[..., 1]
        outputs = grouped_matmul(gated, down, groups)[groups.place].reshape(*experts.shape, hidden)
        return jnp.einsum("tk,tkh->th", weights, outputs.astype(jnp.float32))

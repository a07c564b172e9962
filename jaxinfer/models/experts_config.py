"""Configuration of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.models.config_fields import UnsupportedConfigError

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of the experts and the router's rule.

    Attributes:
        num_experts: experts in a layer.
        experts_per_token: experts chosen for each token.
        intermediate_size: intermediate size of one expert.
        shared_size: intermediate size of the shared experts together, which every token goes through; 0: none.
        dense_layers: numbers of the layers that have a plain MLP, of the model's `intermediate_size`.
        score: function from the router's logits to scores, "softmax" or "sigmoid".
        has_bias: experts are chosen by score plus a bias, and weighted by score alone.
        normalizes: the weights of a token are divided by their sum.
        scaling: factor of all weights.
        num_groups: number of groups of neighbouring experts; 0: no groups.
        kept_groups: number of groups that a token's experts are chosen from.
        has_logit_bias: the router's logits have a bias, which counts in choice and weights.
        logit_cap: the router's logits x become cap * tanh(x / cap).
        has_expert_biases: experts have biases.
        gate_limit: gates are at most this and factors within it either way, and an expert computes down((up + 1) *
            gate * sigmoid(gate_slope * gate)); None: down(act(gate) * up).
        gate_slope: see `gate_limit`.
        shared_is_gated: the shared experts' output is multiplied with the sigmoid of a product with the token.
        is_beside_mlp: experts are computed beside a plain MLP, from the residual stream itself; with norms of their
            own, a norm without weights and a learned scale before the router, and a factor for each expert.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    score: str = "softmax"
    has_bias: bool = False
    normalizes: bool = True
    scaling: float = 1.0
    num_groups: int = 0
    kept_groups: int = 0
    has_logit_bias: bool = False
    logit_cap: float | None = None
    has_expert_biases: bool = False
    gate_limit: float | None = None
    gate_slope: float = 1.702
    shared_is_gated: bool = False
    is_beside_mlp: bool = False

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UnsupportedConfigError(f"the router's score must be one of {', '.join(SCORES)}, got {self.score!r}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UnsupportedConfigError(
                f"num_experts_per_tok={self.experts_per_token} must be between 1 and num_experts={self.num_experts}"
            )
        if not self.num_groups:
            return
        group_size = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or group_size < 2:
            raise UnsupportedConfigError(
                f"n_group={self.num_groups} does not make groups of two or more out of num_experts={self.num_experts}"
            )
        if not 1 <= self.kept_groups <= self.num_groups or self.kept_groups * group_size < self.experts_per_token:
            raise UnsupportedConfigError(
                f"topk_group={self.kept_groups} of n_group={self.num_groups} do not hold "
                f"num_experts_per_tok={self.experts_per_token} experts"
            )

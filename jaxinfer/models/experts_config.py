"""Configurations of mixtures of experts, read from the fields of each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, flag, positive, size

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


def _of_qwen(values: Mapping[str, Any]) -> ExpertsConfig:
    step, only_dense = size(values, "decoder_sparse_step"), _layers(values, "mlp_only_layers")
    dense = [i for i in range(size(values, "num_hidden_layers")) if i in only_dense or (i + 1) % step]
    # Newer versions of transformers write the second name.
    name = "num_experts" if values.get("num_local_experts") is None else "num_local_experts"
    return ExpertsConfig(
        num_experts=size(values, name),
        experts_per_token=size(values, "num_experts_per_tok"),
        intermediate_size=size(values, "moe_intermediate_size"),
        dense_layers=tuple(dense),
        normalizes=flag(values, "norm_topk_prob"),
    )


def _of_bailing(values: Mapping[str, Any]) -> ExpertsConfig:
    inner = size(values, "moe_intermediate_size")
    score, has_bias = values["score_function"], flag(values, "moe_router_enable_expert_bias")
    if has_bias != (score == "sigmoid"):
        raise UnsupportedConfigError(
            f"score_function={score!r} with moe_router_enable_expert_bias={has_bias} is not supported; "
            "scores are softmax without a bias, or sigmoid with one"
        )
    num_groups = size(values, "n_group", 0)
    return ExpertsConfig(
        num_experts=size(values, "num_experts"),
        experts_per_token=size(values, "num_experts_per_tok"),
        intermediate_size=inner,
        shared_size=inner * size(values, "num_shared_experts", 0),
        dense_layers=tuple(range(min(size(values, "first_k_dense_replace", 0), size(values, "num_hidden_layers")))),
        score=score,
        has_bias=has_bias,
        normalizes=flag(values, "norm_topk_prob"),
        scaling=positive(values, "routed_scaling_factor"),
        num_groups=0 if num_groups == 1 else num_groups,
        kept_groups=0 if num_groups <= 1 else size(values, "topk_group"),
    )


def _of_llada(values: Mapping[str, Any]) -> ExpertsConfig:
    # The published code reads router fields that it does not honour.
    for name, only in (
        ("moe_router_score_function", "softmax"),
        ("moe_router_enable_expert_bias", False),
        ("routed_scaling_factor", 1),
    ):
        if values.get(name) not in (None, only):
            raise UnsupportedConfigError(f"{name}={values[name]!r} is not supported; {only!r} is")
    groups = values.get("router_num_group")
    if groups is not None and (not isinstance(groups, int) or groups > 1):
        raise UnsupportedConfigError(f"router_num_group={groups!r} is not supported")
    shared = values.get("shared_expert_intermediate_size")
    counts, num_layers = values.get("moe_layer_freq"), size(values, "num_hidden_layers")
    if not isinstance(counts, list) or len(counts) != num_layers or any(count not in (0, 1) for count in counts):
        raise UnsupportedConfigError(
            f"config.json must set moe_layer_freq to 0 or 1 for each of {num_layers} layers, got {counts!r}"
        )
    return ExpertsConfig(
        num_experts=size(values, "num_experts"),
        experts_per_token=size(values, "num_experts_per_tok"),
        intermediate_size=size(values, "expert_intermediate_size"),
        shared_size=0 if shared is None else size(values, "shared_expert_intermediate_size", 0),
        dense_layers=tuple(number for number, count in enumerate(counts) if not count),
        normalizes=flag(values, "norm_topk_prob"),
    )


def _layers(values: Mapping[str, Any], name: str) -> frozenset[int]:
    found = values.get(name) or []
    if not isinstance(found, list) or any(not isinstance(number, int) for number in found):
        raise UnsupportedConfigError(f"config.json must set {name} to a list of layers, got {found!r}")
    return frozenset(found)


def _qwen_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return _common_fields(config) | {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


def _bailing_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return _common_fields(config) | {
        "num_shared_experts": config.shared_size // config.intermediate_size,
        "first_k_dense_replace": len(config.dense_layers),
        "score_function": config.score,
        "moe_router_enable_expert_bias": config.has_bias,
        "routed_scaling_factor": config.scaling,
        "n_group": config.num_groups,
        "topk_group": config.kept_groups,
    }


def _llada_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return _common_fields(config, "expert_intermediate_size") | {
        "shared_expert_intermediate_size": config.shared_size or None,
        "moe_layer_freq": [int(number not in config.dense_layers) for number in range(num_layers)],
        "moe_router_score_function": config.score,
        "moe_router_enable_expert_bias": config.has_bias,
        "routed_scaling_factor": config.scaling,
        "router_num_group": config.num_groups or None,
        "router_topk_group": config.kept_groups or None,
    }


def _common_fields(config: ExpertsConfig, inner: str = "moe_intermediate_size") -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        inner: config.intermediate_size,
        "norm_topk_prob": config.normalizes,
    }


@dataclass(frozen=True)
class ExpertsFields:
    """Mapping of a family's `config.json` to its experts: a reader, its inverse and the fields' names.

    Reading raises UnsupportedConfigError if a field is missing or wrong, or asks for a router that is not supported.
    Writing also takes the number of the model's layers.
    """

    read: Callable[[Mapping[str, Any]], ExpertsConfig]
    write: Callable[[ExpertsConfig, int], dict[str, Any]]
    other_names: frozenset[str] = frozenset()  # fields that are read but not written

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.write(ExpertsConfig(1, 1, 1), 1)) | self.other_names


QWEN_EXPERTS = ExpertsFields(_of_qwen, _qwen_fields, frozenset({"num_local_experts"}))
BAILING_EXPERTS = ExpertsFields(_of_bailing, _bailing_fields)  # Ling, both versions, and LLaDA2
LLADA_EXPERTS = ExpertsFields(_of_llada, _llada_fields)  # LLaDA-MoE

"""Fields of `config.json` that describe a family's experts: a reader and its inverse for each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, flag, positive, size
from jaxinfer.models.experts_config import ExpertsConfig


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
    score, has_bias = values["score_function"], flag(values, "moe_router_enable_expert_bias")
    if has_bias != (score == "sigmoid"):
        raise UnsupportedConfigError(
            f"score_function={score!r} with moe_router_enable_expert_bias={has_bias} is not supported; "
            "scores are softmax without a bias, or sigmoid with one"
        )
    return _in_groups(values, "num_experts", "num_shared_experts", score=score, has_bias=has_bias)


def _of_glm(values: Mapping[str, Any]) -> ExpertsConfig:
    return _in_groups(values, "n_routed_experts", "n_shared_experts", score="sigmoid", has_bias=True)


def _in_groups(values: Mapping[str, Any], routed: str, shared: str, *, score: str, has_bias: bool) -> ExpertsConfig:
    """Return experts that may be chosen by groups, as DeepSeek-V3's are; `routed` and `shared` name their numbers."""
    inner, num_groups = size(values, "moe_intermediate_size"), size(values, "n_group", 0)
    return ExpertsConfig(
        num_experts=size(values, routed),
        experts_per_token=size(values, "num_experts_per_tok"),
        intermediate_size=inner,
        shared_size=inner * size(values, shared, 0),
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


def _of_mixtral(values: Mapping[str, Any]) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=size(values, "num_local_experts"),
        experts_per_token=size(values, "num_experts_per_tok"),
        intermediate_size=size(values, "intermediate_size"),
    )


def _of_minimax(values: Mapping[str, Any]) -> ExpertsConfig:
    return replace(_of_mixtral(values), score="sigmoid", has_bias=True)


def _of_gpt_oss(values: Mapping[str, Any]) -> ExpertsConfig:
    per_token, repeated = values.get("num_experts_per_tok"), values.get("experts_per_token")
    if repeated not in (None, per_token):
        raise UnsupportedConfigError(f"experts_per_token={repeated!r} differs from num_experts_per_tok={per_token!r}")
    return replace(
        _of_mixtral(values),
        has_logit_bias=True,
        has_expert_biases=True,
        gate_limit=positive(values, "swiglu_limit"),
        gate_slope=positive(values, "swiglu_alpha"),
    )


def _of_qwen2_moe(values: Mapping[str, Any]) -> ExpertsConfig:
    shared = size(values, "shared_expert_intermediate_size", 0)
    return replace(_of_qwen(values), shared_size=shared, shared_is_gated=shared > 0)


def _of_laguna(values: Mapping[str, Any]) -> ExpertsConfig:
    count, kinds = size(values, "num_hidden_layers"), values.get("mlp_layer_types")
    kinds = ["dense", *["sparse"] * (count - 1)] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise UnsupportedConfigError(
            f"config.json must set mlp_layer_types to dense or sparse for each of {count} layers, got {kinds!r}"
        )
    cap = values.get("moe_router_logit_softcapping")
    return ExpertsConfig(
        num_experts=size(values, "num_experts"),
        experts_per_token=size(values, "num_experts_per_tok"),
        intermediate_size=size(values, "moe_intermediate_size"),
        shared_size=size(values, "shared_expert_intermediate_size", 0),
        dense_layers=tuple(number for number, kind in enumerate(kinds) if kind == "dense"),
        score="sigmoid",
        has_bias=True,
        scaling=positive(values, "moe_routed_scaling_factor"),
        logit_cap=positive(values, "moe_router_logit_softcapping") if cap else None,
    )


def _of_gemma4(values: Mapping[str, Any]) -> ExpertsConfig | None:
    if not flag(values, "enable_moe_block"):
        return None
    return ExpertsConfig(
        num_experts=size(values, "num_experts"),
        experts_per_token=size(values, "top_k_experts"),
        intermediate_size=size(values, "moe_intermediate_size"),
        is_beside_mlp=True,
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


def _mixtral_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    # The size of an expert is written as the model's `intermediate_size`.
    return {"num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token}


def _gpt_oss_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return _mixtral_fields(config, num_layers) | {"swiglu_limit": config.gate_limit, "swiglu_alpha": config.gate_slope}


def _qwen2_moe_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return _qwen_fields(config, num_layers) | {"shared_expert_intermediate_size": config.shared_size}


def _glm_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return {
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.intermediate_size,
        "n_shared_experts": config.shared_size // config.intermediate_size,
        "first_k_dense_replace": len(config.dense_layers),
        "norm_topk_prob": config.normalizes,
        "routed_scaling_factor": config.scaling,
        "n_group": config.num_groups or 1,
        "topk_group": config.kept_groups or 1,
    }


def _laguna_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.intermediate_size,
        "shared_expert_intermediate_size": config.shared_size,
        "mlp_layer_types": ["dense" if number in config.dense_layers else "sparse" for number in range(num_layers)],
        "moe_routed_scaling_factor": config.scaling,
        "moe_router_logit_softcapping": config.logit_cap or 0.0,
    }


def _gemma4_fields(config: ExpertsConfig, num_layers: int) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": config.num_experts,
        "top_k_experts": config.experts_per_token,
        "moe_intermediate_size": config.intermediate_size,
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

    Reading returns None if the model has no experts, and raises UnsupportedConfigError if a field is missing or wrong,
    or asks for a router that is not supported. Writing also takes the number of the model's layers.
    """

    read: Callable[[Mapping[str, Any]], ExpertsConfig | None]
    write: Callable[[ExpertsConfig, int], dict[str, Any]]
    other_names: frozenset[str] = frozenset()  # fields that are read but not written

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.write(ExpertsConfig(1, 1, 1), 1)) | self.other_names


QWEN_EXPERTS = ExpertsFields(_of_qwen, _qwen_fields, frozenset({"num_local_experts"}))
BAILING_EXPERTS = ExpertsFields(_of_bailing, _bailing_fields)  # Ling, both versions, and LLaDA2
LLADA_EXPERTS = ExpertsFields(_of_llada, _llada_fields)  # LLaDA-MoE
MIXTRAL_EXPERTS = ExpertsFields(_of_mixtral, _mixtral_fields)
MINIMAX_EXPERTS = ExpertsFields(_of_minimax, _mixtral_fields)
GPT_OSS_EXPERTS = ExpertsFields(_of_gpt_oss, _gpt_oss_fields, frozenset({"experts_per_token"}))
QWEN2_MOE_EXPERTS = ExpertsFields(_of_qwen2_moe, _qwen2_moe_fields, frozenset({"num_local_experts"}))
GLM_EXPERTS = ExpertsFields(_of_glm, _glm_fields)
LAGUNA_EXPERTS = ExpertsFields(_of_laguna, _laguna_fields)
GEMMA4_EXPERTS = ExpertsFields(_of_gemma4, _gemma4_fields)

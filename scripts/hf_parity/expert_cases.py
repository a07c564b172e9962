"""Fixtures of families with experts, other than Gemma."""

from __future__ import annotations

from hf_parity.case import FULL, SLIDING, SMALL, WINDOW, Case, default_rope
from hf_parity.routers import Routing

_SIGMOID = Routing(top_k=2, is_sigmoid=True)

_QWEN3_MOE = {
    "vocab_size": 128, "hidden_size": 48, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
_QWEN = {
    "qwen3_moe": Case("qwen3_moe", _QWEN3_MOE | {
        "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }, routing=Routing(top_k=2)),
    # Of four layers, `decoder_sparse_step` leaves experts to the second and fourth, `mlp_only_layers` to the fourth.
    "qwen3_moe_mixed": Case("qwen3_moe", _QWEN3_MOE | {
        "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": False,
        "decoder_sparse_step": 2, "mlp_only_layers": [1], "tie_word_embeddings": True,
    }, routing=Routing(top_k=3), old_format=True),
    # All layers slide: `max_window_layers` is not read.
    "qwen3_moe_window": Case("qwen3_moe", SMALL | {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_parameters": default_rope(),
    }, routing=Routing(top_k=2), old_format=True),
    "qwen2_moe": Case("qwen2_moe", SMALL | {
        "head_dim": 8, "num_hidden_layers": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
        "norm_topk_prob": False, "rope_parameters": default_rope(),
    }, routing=Routing(top_k=2)),
}  # fmt: skip

# The beginning of a layer for drafting.
_DRAFTING: dict[str, tuple[int, ...]] = {
    "model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.enorm.weight": (32,),
    "model.layers.3.hnorm.weight": (32,), "model.layers.3.input_layernorm.weight": (32,),
    "model.layers.3.shared_head.norm.weight": (32,),
}  # fmt: skip
_MIXTRAL_AND_OTHERS = {
    "mixtral": Case("mixtral", SMALL | {
        "head_dim": 16, "intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2,
        "rope_parameters": default_rope(1000000.0),
    }, routing=Routing(top_k=2)),
    # The first layer is dense; half a head is rotated.
    "glm4_moe": Case("glm4_moe", SMALL | {
        "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16, "attention_bias": True, "use_qk_norm": True,
        "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "eos_token_id": [2, 3], "rope_parameters": default_rope(1000000.0, partial_rotary_factor=0.5),
    }, routing=_SIGMOID, old_format=True, unused=_DRAFTING),
    # Besides what transformers reads, fields that published files have.
    "minimax_m2": Case("minimax_m2", SMALL | {
        "head_dim": 16, "rotary_dim": 8, "intermediate_size": 12, "num_local_experts": 6, "num_experts_per_tok": 2,
        "rope_parameters": default_rope(5000000.0), "use_qk_norm": True, "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0,
    }, routing=_SIGMOID, old_format=True),
}  # fmt: skip

_LAGUNA = SMALL | {
    "hidden_size": 32, "head_dim": 16, "sliding_window": WINDOW, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        FULL: {"rope_type": "yarn", "rope_theta": 50000.0, "partial_rotary_factor": 0.5, "factor": 4.0,
               "beta_fast": 8.0, "beta_slow": 0.5, "original_max_position_embeddings": 64, "attention_factor": 1.15},
        SLIDING: default_rope(partial_rotary_factor=1.0),
    },
}  # fmt: skip
_LAGUNAS = {
    "laguna": Case("laguna", _LAGUNA | {
        "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, SLIDING], "num_attention_heads_per_layer": [4, 6, 6],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "gating": "per-head",
    }, routing=_SIGMOID),
    # A gate on every element, and a cap on the routers' logits.
    "laguna_element": Case("laguna", _LAGUNA | {
        "num_hidden_layers": 2, "layer_types": [FULL, SLIDING], "num_attention_heads_per_layer": [4, 6],
        "mlp_layer_types": ["dense", "sparse"], "gating": "per-element", "moe_router_logit_softcapping": 2.0,
    }, routing=_SIGMOID),
}  # fmt: skip

# Layers slide and are full in turn. The limit is low enough to cut.
_GPT_OSS = SMALL | {
    "hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4,
    "num_experts_per_tok": 2, "swiglu_limit": 2.0,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 8.0,
                        "beta_slow": 0.5, "truncate": False, "original_max_position_embeddings": 32},
}  # fmt: skip
_GPT_OSSES = {
    "gpt_oss": Case("gpt_oss", _GPT_OSS, routing=Routing(top_k=2)),
    # Two blocks of 32 in every row.
    "gpt_oss_mxfp4": Case("gpt_oss", _GPT_OSS | {
        "hidden_size": 64, "intermediate_size": 64, "head_dim": 8,
    }, routing=Routing(top_k=2), old_format=True, is_mxfp4=True),
}  # fmt: skip

EXPERT_CASES: dict[str, Case] = _QWEN | _MIXTRAL_AND_OTHERS | _LAGUNAS | _GPT_OSSES

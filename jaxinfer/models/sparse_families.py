"""Families of autoregressive models whose layers are mixtures of experts."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import layer_fields as rules
from jaxinfer.models.dense_families import ATTENTION_BIAS, COMMON, MISTRAL, QWEN, QWEN_3, TRAINING
from jaxinfer.models.experts_fields import (
    BAILING_EXPERTS,
    GLM_EXPERTS,
    GPT_OSS_EXPERTS,
    LAGUNA_EXPERTS,
    MINIMAX_EXPERTS,
    MIXTRAL_EXPERTS,
    QWEN2_MOE_EXPERTS,
    QWEN_EXPERTS,
)
from jaxinfer.models.family import Choice, Family
from jaxinfer.models.rope_fields import RopeReading

_LING = COMMON | {
    "rope_theta": 600000.0, "max_position_embeddings": 32768, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0, "num_shared_experts": 0, "n_group": 0, "topk_group": 0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
LING_2 = _LING | {
    "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True, "eos_token_id": 156892,
}  # fmt: skip
LING_FIELDS: dict[str, Any] = {
    "qkv_bias_fields": ("use_bias", "use_qkv_bias"), "o_bias_fields": ("use_bias",), "qk_norm_field": "use_qk_norm",
    "rope": RopeReading(has_partial=True), "has_norm_head": True, "has_nextn_layers": True, "experts": BAILING_EXPERTS,
    "names": "bailing", "has_remote_code": True,
    "unused_fields": frozenset({
        "embedding_dropout", "output_dropout", "router_dtype", "use_rmsnorm", "max_window_layers",
        "output_router_logits", "router_aux_loss_coef", "mtp_loss_scaling_factor",
        "moe_shared_expert_intermediate_size",
    }),
}  # fmt: skip

SPARSE_FAMILIES = (
    Family("Qwen3MoeForCausalLM", "qwen3_moe",
           "Qwen3-MoE: Qwen3's attention, and experts in place of the MLP of most layers.",
           **QWEN_3, layer_fields=rules.QWEN3_MOE_LAYERS, experts=QWEN_EXPERTS,
           unused_fields=TRAINING,
           defaults=QWEN | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
                             "num_key_value_heads": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
                             "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False}),
    Family("Qwen2MoeForCausalLM", "qwen2_moe",
           "Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts, and a shared one with a gate.",
           qkv_bias_fields=("qkv_bias",), layer_fields=rules.QWEN2_MOE_LAYERS, experts=QWEN2_MOE_EXPERTS,
           names="qwen2_moe", unused_fields=TRAINING,
           defaults=QWEN | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                            "num_attention_heads": 16, "num_key_value_heads": 16, "decoder_sparse_step": 1,
                            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                            "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "qkv_bias": True}),
    Family("MixtralForCausalLM", "mixtral",
           "Mixtral: Mistral's attention, and experts that a softmax scores.",
           layer_fields=rules.ALL_WINDOWED, experts=MIXTRAL_EXPERTS, names="mixtral",
           unused_fields=TRAINING | {"router_jitter_noise"},
           defaults=MISTRAL | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8,
                               "num_experts_per_tok": 2}),
    Family("GptOssForCausalLM", "gpt_oss",
           "gpt-oss: sinks, a window in every second layer, experts with biases and clamped gates, MXFP4 read.",
           **ATTENTION_BIAS, layer_fields=rules.ALTERNATING, experts=GPT_OSS_EXPERTS, names="gpt_oss",
           quantization="mxfp4", unused_fields=TRAINING | {"initial_context_length"},
           switches={"has_sinks": True, "float32_norms": True},
           rope=RopeReading(absent={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                    "truncate": False, "original_max_position_embeddings": 4096}),
           defaults=COMMON | {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
                              "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
                              "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                              "sliding_window": 128, "rope_theta": 150000.0, "attention_bias": True,
                              "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
                              "swiglu_alpha": 1.702}),
    Family("Glm4MoeForCausalLM", "glm4_moe",
           "GLM-4.5, 4.6 and 4.7: half of each head rotated, experts that a sigmoid scores, shared ones.",
           qkv_bias_fields=("attention_bias",), qk_norm_field="use_qk_norm", rope=RopeReading(has_partial=True),
           has_nextn_layers=True, experts=GLM_EXPERTS, names="glm4_moe", unused_fields=TRAINING,
           defaults=COMMON | {"vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46,
                              "num_attention_heads": 96, "num_key_value_heads": 8,
                              "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
                              "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
                              "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
                              "first_k_dense_replace": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
                              "eos_token_id": [151329, 151336, 151338]}),
    Family("MiniMaxM2ForCausalLM", "minimax_m2",
           "MiniMax-M2: half of each head rotated, norms of q and k over all heads, experts that a sigmoid scores.",
           qk_norm=True, rope=RopeReading(has_partial=True), experts=MINIMAX_EXPERTS, names="minimax_m2",
           switches={"qk_norm_of": "all_heads"},
           fixed={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
                  "qk_norm_type": "per_layer", "shared_intermediate_size": 0},
           unused_fields=TRAINING | {"attn_type_list", "use_mtp", "num_mtp_modules", "mtp_transformer_layers",
                                     "router_jitter_noise", "layernorm_full_attention_beta"},
           defaults=COMMON | {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
                              "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
                              "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6,
                              "num_local_experts": 256, "num_experts_per_tok": 8}),
    Family("LagunaForCausalLM", "laguna",
           "Laguna: query heads and rotations by layer, gated attention, experts that a sigmoid scores, a shared one.",
           **ATTENTION_BIAS, qk_norm=True, layer_fields=rules.LAGUNA_LAYERS, experts=LAGUNA_EXPERTS, names="laguna",
           choices=(Choice("gating", {
               True: {"gate": "softplus", "gate_of": "head"}, "per-head": {"gate": "softplus", "gate_of": "head"},
               "per-element": {"gate": "softplus", "gate_of": "element"}, False: {"gate": "none"}}),),
           fixed={"moe_apply_router_weight_on_input": False},
           unused_fields=TRAINING | {"gating_types", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
                                     "auto_map"},
           defaults=COMMON | {"vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
                              "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8,
                              "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 512,
                              "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                              "num_experts_per_tok": 8, "num_experts": 256, "gating": True,
                              "moe_routed_scaling_factor": 1.0, "moe_router_logit_softcapping": 0.0}),
    Family("BailingMoeForCausalLM", "bailing_moe",
           "Ling: Llama's attention, experts that a softmax scores, and shared ones.",
           **LING_FIELDS,
           defaults=_LING | {"score_function": "softmax", "use_qk_norm": False}),
    Family("BailingMoeV2ForCausalLM", "bailing_moe",
           "Ling 2.0: heads with norms, rotated in part; experts that a sigmoid scores, by groups and with a bias.",
           **LING_FIELDS, defaults=LING_2),
)  # fmt: skip

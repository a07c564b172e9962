"""Families are known by their names, absent fields are as in transformers, and single fields are switches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.families import FAMILIES
from tests.models.layer_patterns import read, refusal
from tests.models.test_config import MODEL_TYPES

DIFFUSION_TYPES = {"SDARForCausalLM": "sdar", "LLaDA2MoeModelLM": "llada2_moe"}
# See `test_llada_config.py`.
BIDIRECTIONAL_TYPES = {"LLaDAModelLM": "llada", "LLaDAMoEModelLM": "llada"}
# Of mixtures of experts, see `test_sparse_config.py`. Two versions of Ling share a model type.
SPARSE_TYPES = {
    "Qwen3MoeForCausalLM": "qwen3_moe", "BailingMoeForCausalLM": "bailing_moe",
    "BailingMoeV2ForCausalLM": "bailing_moe", "Qwen2MoeForCausalLM": "qwen2_moe", "MixtralForCausalLM": "mixtral",
    "GptOssForCausalLM": "gpt_oss", "Glm4MoeForCausalLM": "glm4_moe", "MiniMaxM2ForCausalLM": "minimax_m2",
    "LagunaForCausalLM": "laguna",
}  # fmt: skip
# See `test_layer_fields.py` and `test_family_ropes.py`.
OTHER_TYPES = {
    "MistralForCausalLM": "mistral", "Ministral3ForCausalLM": "ministral3", "SeedOssForCausalLM": "seed_oss",
    "Phi3ForCausalLM": "phi3", "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite",
    "Ernie4_5ForCausalLM": "ernie4_5", "Glm4ForCausalLM": "glm4", "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3", "Exaone4ForCausalLM": "exaone4", "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text", "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text", "MuseGlimmerForCausalLM": "muse_glimmer_text",
}  # fmt: skip


def test_every_family_names_its_model_type():
    types = {family.architecture: family.model_type for family in FAMILIES.values()}
    assert types == MODEL_TYPES | DIFFUSION_TYPES | BIDIRECTIONAL_TYPES | SPARSE_TYPES | OTHER_TYPES


@pytest.mark.parametrize(
    ("names", "architecture"),
    [
        *(({"model_type": model_type}, name) for name, model_type in OTHER_TYPES.items()),
        *(({"architectures": [name]}, name) for name in OTHER_TYPES),
        ({"model_type": "ministral"}, "MistralForCausalLM"),
        ({"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}, "MistralForCausalLM"),
        ({"architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5"}, "Ernie4_5ForCausalLM"),
    ],
)
def test_a_model_type_or_an_architecture_is_enough_to_know_a_family(names, architecture):
    assert ModelConfig.from_hf(names).architecture == architecture


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if not family.has_remote_code))
def test_what_a_file_omits_is_what_the_class_of_transformers_says(name):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    hf = {"architectures": [name], "model_type": FAMILIES[name].model_type, "head_dim": 128}
    written = CONFIG_MAPPING[hf["model_type"]](head_dim=128).to_dict()
    assert ModelConfig.from_hf(json.loads(json.dumps(written)) | hf) == ModelConfig.from_hf(hf)


# Family, its fields, and attributes of the configuration.
SWITCHES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # An absent scale of scores is 1 in Granite, and not the usual one.
    ("granite", {}, {"attention_scale": 1.0, "embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}),
    ("granite", {"attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22,
                 "logits_scaling": 16.0},
     {"attention_scale": 0.0078125, "embed_scale": 12.0, "residual_scale": 0.22, "logit_scale": 1 / 16}),
    ("granite", {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    ("gemma2", {}, {"attention_scale": 256**-0.5, "score_cap": 50.0, "logit_cap": 30.0, "embed_scale": 48.0,
                    "norms": "around", "norm_offset": "all", "tie_word_embeddings": True, "hidden_act":
                    "gelu_pytorch_tanh"}),
    ("gemma2", {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                "hidden_act": "relu"},
     {"attention_scale": 144**-0.5, "score_cap": None, "logit_cap": None, "hidden_act": "gelu_pytorch_tanh"}),
    # transformers reads Gemma 3's cap of scores and never applies it.
    ("gemma3_text", {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 168, "final_logit_softcapping": 30.0},
     {"attention_scale": 168**-0.5, "score_cap": None, "logit_cap": 30.0, "qk_norm": True, "norm_offset": "all"}),
    ("gemma4_text", {}, {"attention_scale": 1.0, "v_norm": True, "norm_offset": "none", "per_layer_size": 256,
                         "experts": None, "logit_cap": None, "has_layer_scalar": True}),
    ("gemma4_text", {"hidden_size_per_layer_input": None}, {"per_layer_size": 0}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}, {"per_layer_size": 0}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
     {"experts": ExpertsConfig(8, 2, 64, is_beside_mlp=True)}),
    ("gemma4_unified_text", {}, {"per_layer_size": 0, "experts": None, "attention_scale": 1.0, "v_norm": True}),
    ("gpt_oss", {"num_hidden_layers": 2},
     {"has_sinks": True, "qkv_bias": True, "o_bias": True, "float32_norms": True,
      "experts": ExpertsConfig(128, 4, 2880, has_logit_bias=True, has_expert_biases=True, gate_limit=7.0)}),
    ("gpt_oss", {"attention_bias": False, "experts_per_token": 4}, {"qkv_bias": False, "o_bias": False}),
    ("seed_oss", {}, {"qkv_bias": True, "o_bias": False, "mlp_bias": False}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, {"qkv_bias": False, "o_bias": True}),
    ("ernie4_5", {"use_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "pairs_neighbours": True}),
    ("glm4", {}, {"qkv_bias": True, "o_bias": False, "norms": "around", "pairs_neighbours": True}),
    ("glm4", {"attention_bias": False}, {"qkv_bias": False, "o_bias": False}),
    ("glm4_moe", {"head_dim": 128, "use_qk_norm": True, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
     {"qk_norm": True, "pairs_neighbours": False, "num_nextn_layers": 1,
      "experts": ExpertsConfig(128, 8, 1408, shared_size=2816, dense_layers=(0,), score="sigmoid", has_bias=True,
                               scaling=2.5)}),
    ("glm4_moe", {"head_dim": 128, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
     {"qk_norm": False, "num_nextn_layers": 0,
      "experts": ExpertsConfig(128, 8, 1408, shared_size=1408, dense_layers=(0,), score="sigmoid", has_bias=True,
                               num_groups=4, kept_groups=2)}),
    ("qwen2_moe", {"mlp_only_layers": [1]},
     {"qkv_bias": True, "experts": ExpertsConfig(60, 4, 1408, shared_size=5632, dense_layers=(1,), normalizes=False,
                                                 shared_is_gated=True)}),
    ("qwen2_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0},
     {"qkv_bias": False, "experts": ExpertsConfig(60, 4, 1408, normalizes=False)}),
    ("mixtral", {"router_jitter_noise": 0.1}, {"experts": ExpertsConfig(8, 2, 14336)}),
    ("minimax_m2", {}, {"qk_norm_of": "all_heads",
                        "experts": ExpertsConfig(256, 8, 1536, score="sigmoid", has_bias=True)}),
    ("olmo2", {}, {"norms": "after", "qk_norm_of": "all_heads", "num_kv_heads": 32}),
    ("exaone4", {}, {"norms": "after", "qk_norm_of": "head", "qk_norm": True}),
    ("hunyuan_v1_dense", {}, {"qk_norm_of": "rotated_head", "qk_norm": True}),
    ("muse_glimmer_text", {"qk_scale_factor": 2, "output_multiplier": 0.5, "post_norm_eps": 0.1},
     {"q_factor": 2.0, "logit_scale": 0.5, "post_norm_eps": 0.1, "logit_cap": 20.0, "gate": "sigmoid",
      "gate_of": "element", "embed_norm": True, "qk_norm_has_weights": False, "norm_offset": "layers"}),
    *(("laguna", {"gating": value}, {"gate": "softplus", "gate_of": of})
      for value, of in ((True, "head"), ("per-head", "head"), ("per-element", "element"))),
    ("laguna", {"gating": False}, {"gate": "none"}),
    ("laguna", {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
                "moe_router_logit_softcapping": 2.0, "moe_routed_scaling_factor": 2.5},
     {"experts": ExpertsConfig(256, 8, 512, shared_size=512, dense_layers=(1,), score="sigmoid", has_bias=True,
                               scaling=2.5, logit_cap=2.0)}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "fields", "found"), SWITCHES)
def test_fields_of_a_family_are_switches_of_its_layers(model_type, fields, found):
    config = read(model_type, **fields)
    assert {name: getattr(config, name) for name in found} == found


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("granite", {"attention_multiplier": 0}, "attention_multiplier to a positive number, got 0"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling to a positive number, got '8'"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping to a positive number, got -1.0"),
        ("gemma2", {"hidden_activation": "swiglu"}, "hidden_act='swiglu' is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "allowed: None, 'vision'"),
        ("gemma4_text", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input to an integer of at least 0"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts to a positive integer, got None"),
        ("laguna", {"gating": "per-layer"}, "gating='per-layer' is not supported; allowed: True, 'per-head'"),
        ("laguna", {"gating": ["per-head"]}, "gating=['per-head'] is not supported"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input=True"),
        ("laguna", {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types to dense or sparse"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True is not supported; False is"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm=False is not supported; True is"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False is not supported"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported; 0 is"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2 differs from num_experts_per_tok=4"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit to a positive number, got None"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be between 1 and num_experts=8"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config is set"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2 is not supported; 1 is"),
    ],
)
def test_values_that_a_family_does_not_compute_are_refused_by_name(model_type, fields, message):
    assert message in refusal(model_type, **fields)


def test_fields_of_published_files_that_change_nothing_are_accepted():
    fields = {"sliding_window_size": 4096, "cache_implementation": "hybrid", "hidden_act": "gelu"}
    assert read("gemma2", **fields) == read("gemma2")
    fields = {"attn_type_list": [1] * 62, "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
    assert read("minimax_m2", **fields) == read("minimax_m2")
    assert read("phi3", full_attn_mod=1, interpolate_factor=1, lm_head_bias=False) == read("phi3")

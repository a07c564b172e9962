"""Families of autoregressive models without experts, or with experts in some of their published sizes."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import layer_fields as rules
from jaxinfer.models.experts_fields import GEMMA4_EXPERTS
from jaxinfer.models.family import ChoiceField, Family, NumberField
from jaxinfer.models.rope_fields import RopeReading

COMMON = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = COMMON | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
ATTENTION_BIAS: dict[str, Any] = {"qkv_bias_fields": ("attention_bias",), "o_bias_fields": ("attention_bias",)}
QWEN_3: dict[str, Any] = ATTENTION_BIAS | {"qk_norm": True}
# What Mistral's models have, in the sizes of its configuration class.
MISTRAL = COMMON | {
    "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef"})
_OLMO_DEFAULTS = COMMON | {
    "vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}  # fmt: skip


def _root(value: float) -> float:
    return value**-0.5


def _of_root(value: float) -> float:
    found = round(value**-2, 6)
    return int(found) if found == int(found) else found  # transformers takes an integer only


def _inverse(value: float) -> float:
    return 1 / value


_UNUSED = frozenset({"hidden_act", "cache_implementation"})
_GEMMA: dict[str, Any] = ATTENTION_BIAS | {
    "names": "gemma", "renamed": {"hidden_act": "hidden_activation"}, "scales_embeddings": True,
    "unused_fields": _UNUSED, "fixed": {"use_bidirectional_attention": None},
}  # fmt: skip
_GEMMA_NORMS = {"norms": "around", "norm_offset": "all", "float32_norms": True}
_GEMMA_SCALE = NumberField("query_pre_attn_scalar", "attention_scale", _root, _of_root)
_LOGIT_CAP = NumberField("final_logit_softcapping", "logit_cap")
_PER_LAYER = NumberField("hidden_size_per_layer_input", "per_layer_size", is_size=True)
_GEMMA_DEFAULTS = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
_GEMMA_2: dict[str, Any] = _GEMMA | {"unused_fields": _UNUSED | {"sliding_window_size"}}  # it repeats sliding_window
_GEMMA_3: dict[str, Any] = _GEMMA | {
    "unused_fields": _UNUSED | {"attn_logit_softcapping", "_sliding_window_pattern"},
}  # fmt: skip
_GEMMA_4: dict[str, Any] = _GEMMA | {
    "unused_fields": _UNUSED | {"vocab_size_per_layer_input"}, "layer_fields": rules.GEMMA4_LAYERS, "qk_norm": True,
    "absent": frozenset({"rope_theta", "rope_scaling"}), "fixed": {},
    "choices": (ChoiceField("use_bidirectional_attention", {None: {}, "vision": {}}),),
    "switches": {
        "norms": "around", "float32_norms": True, "attention_scale": 1.0, "v_norm": True, "has_layer_scalar": True,
    },
}  # fmt: skip
_GEMMA_4_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 131072, "sliding_window": 512,
    "num_kv_shared_layers": 0,
}  # fmt: skip

DENSE_FAMILIES = (
    Family("LlamaForCausalLM", "llama",
           "Llama 2 and 3.x: grouped-query attention, optional biases, linear, llama3 or yarn rotary scaling.",
           **ATTENTION_BIAS, mlp_bias_field="mlp_bias",
           defaults=COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048,
                              "bos_token_id": 1, "eos_token_id": 2},
           published="Llama 2, 3.x; TinyLlama, SmolLM2, Yi, DeepSeek-R1-Distill-Llama"),
    Family("Qwen2ForCausalLM", "qwen2",
           "Qwen2 and Qwen2.5: the Llama layout with biases on q, k and v.",
           qkv_bias=True, layer_fields=rules.QWEN_LAYERS, defaults=QWEN,
           published="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
    Family("Qwen3ForCausalLM", "qwen3",
           "Qwen3 dense: the Llama layout with an RMS norm on every head of q and k before the rotation.",
           **QWEN_3, layer_fields=rules.QWEN_LAYERS, defaults=QWEN | {"head_dim": 128},
           published="Qwen3-0.6B to 32B"),
    Family("MistralForCausalLM", "mistral",
           "Mistral: the Llama layout, in its first version with a window in all layers.",
           frozenset({"ministral"}), other_architectures=frozenset({"MinistralForCausalLM"}),
           layer_fields=rules.MISTRAL_LAYERS, defaults=MISTRAL | {"sliding_window": 4096},
           published="Mistral-7B v0.1 to v0.3, Nemo, Small-24B; Ministral-8B; in Mistral-Small-3.x"),
    Family("Ministral3ForCausalLM", "ministral3",
           "Ministral 3 and Devstral 2: Mistral's layers, yarn, and queries that grow with their position.",
           layer_fields=rules.ALL_WINDOWED, grows_queries=True,
           rope=RopeReading(
               absent={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                       "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
                       "llama_4_scaling_beta": 0.1},
               ignored=frozenset({"llama_4_scaling_beta", "max_position_embeddings"})),
           defaults=MISTRAL | {"vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128,
                               "max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
           published="Ministral-3, Devstral-2; in their wrappers"),
    Family("SeedOssForCausalLM", "seed_oss",
           "Seed-OSS: the Llama layout with biases on q, k and v.",
           qkv_bias_fields=("attention_bias",), o_bias_fields=("attention_out_bias",), mlp_bias_field="mlp_bias",
           unused_fields=frozenset({"residual_dropout"}),
           defaults=COMMON | {"vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64,
                              "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
                              "max_position_embeddings": 524288, "attention_bias": True, "bos_token_id": 0,
                              "eos_token_id": 2},
           published="Seed-OSS-36B"),
    Family("Phi3ForCausalLM", "phi3",
           "Phi-3, Phi-3.5 and Phi-4: the Llama layout with fused projections, longrope for long contexts.",
           layer_fields=rules.ALL_WINDOWED, names="phi3",
           rope=RopeReading(has_partial=True, names={"su": "longrope", "yarn": "longrope"},
                            types=frozenset({"default", "longrope"})),
           fixed={"full_attn_mod": 1, "interpolate_factor": 1},
           unused_fields=frozenset({"resid_pdrop", "embd_pdrop"}),
           defaults=COMMON | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
                              "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                              "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000},
           published="Phi-3-mini and -medium, Phi-3.5-mini, Phi-4, Phi-4-mini"),
    Family("SmolLM3ForCausalLM", "smollm3",
           "SmolLM3: the Llama layout, in which every fourth layer is not rotated.",
           **ATTENTION_BIAS, mlp_bias_field="mlp_bias", layer_fields=rules.SMOLLM3_LAYERS,
           fixed={"use_sliding_window": False}, unused_fields=frozenset({"sliding_window"}),
           defaults=COMMON | {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
                              "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
                              "max_position_embeddings": 32768, "rope_theta": 2e6, "no_rope_layer_interval": 4,
                              "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001},
           published="SmolLM3-3B"),
    Family("GraniteForCausalLM", "granite",
           "Granite 3: the Llama layout with factors of embeddings, scores, results and logits.",
           **ATTENTION_BIAS, mlp_bias_field="mlp_bias",
           numbers=(NumberField("embedding_multiplier", "embed_scale"),
                    NumberField("attention_multiplier", "attention_scale"),
                    NumberField("residual_multiplier", "residual_scale"),
                    NumberField("logits_scaling", "logit_scale", _inverse, _inverse)),
           defaults=COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048,
                              "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0,
                              "logits_scaling": 1.0, "bos_token_id": 1, "eos_token_id": 2},
           published="granite-3.0 to 3.3, dense"),
    Family("Ernie4_5ForCausalLM", "ernie4_5",
           "ERNIE 4.5 dense: the Llama layout, rotated in pairs of neighbours.",
           other_architectures=frozenset({"Ernie4_5_ForCausalLM"}), qkv_bias_fields=("use_bias",),
           o_bias_fields=("use_bias",), mlp_bias_field="use_bias", switches={"pairs_neighbours": True},
           defaults=COMMON | {"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
                              "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
                              "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                              "rope_theta": 5e5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
           published="ERNIE-4.5-0.3B"),
    Family("Glm4ForCausalLM", "glm4",
           "GLM-4-0414 and GLM-Z1: half of each head rotated in pairs of neighbours, four norms a layer.",
           qkv_bias_fields=("attention_bias",), names="glm4", rope=RopeReading(has_partial=True),
           switches={"norms": "around", "pairs_neighbours": True},
           defaults=COMMON | {"vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40,
                              "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
                              "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
                              "eos_token_id": [151329, 151336, 151338]},
           published="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1"),
    Family("Olmo2ForCausalLM", "olmo2",
           "OLMo 2: norms after attention and MLP, and norms of q and k over all heads.",
           **ATTENTION_BIAS, qk_norm=True, names="olmo2",
           switches={"norms": "after", "float32_norms": True, "qk_norm_of": "all_heads"},
           defaults=_OLMO_DEFAULTS,
           published="OLMo-2-1B to 32B"),
    Family("Olmo3ForCausalLM", "olmo3",
           "OLMo 3: OLMo 2's layers, three of four with a window.",
           **ATTENTION_BIAS, qk_norm=True, names="olmo2", layer_fields=rules.OLMO3_LAYERS,
           switches={"norms": "after", "float32_norms": True, "qk_norm_of": "all_heads"},
           defaults=_OLMO_DEFAULTS | {"sliding_window": 4096},
           published="Olmo-3-7B, -32B"),
    Family("Exaone4ForCausalLM", "exaone4",
           "EXAONE 4: norms after attention and MLP; in 32B three of four layers have a window, the rest no rotation.",
           qk_norm=True, names="olmo2", layer_fields=rules.EXAONE4_LAYERS, switches={"norms": "after"},
           defaults=COMMON | {"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
                              "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096,
                              "sliding_window_pattern": 4, "bos_token_id": 0, "eos_token_id": 2},
           published="EXAONE-4.0-1.2B, -32B"),
    Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
           "Hunyuan dense: norms of q and k after the rotation, whose base `alpha` stretches.",
           **ATTENTION_BIAS, qk_norm=True, names="hunyuan", rope=RopeReading(has_alpha=True),
           switches={"qk_norm_of": "rotated_head"},
           fixed={"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms", "use_cla": False},
           unused_fields=frozenset({
               "attention_head_dim", "org_vocab_size", "cla_share_factor", "class_num", "dense_list", "pool_type",
               "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id", "text_end_id",
               "text_start_id", "video_end_id", "video_start_id", "mask_init_id", "pad_id",
           }),
           defaults=COMMON | {"vocab_size": 290943, "intermediate_size": 11008, "max_position_embeddings": 2048,
                              "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
           published="Hunyuan-0.5B to 7B, Hunyuan-MT-7B"),
    Family("Gemma2ForCausalLM", "gemma2",
           "Gemma 2: norms before and after, capped scores and logits, every second layer with a window.",
           **_GEMMA_2,
           layer_fields=rules.ALTERNATING, switches=_GEMMA_NORMS,
           numbers=(_GEMMA_SCALE, _LOGIT_CAP, NumberField("attn_logit_softcapping", "score_cap")),
           defaults=_GEMMA_DEFAULTS | {"vocab_size": 256000, "max_position_embeddings": 8192,
                                       "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
           published="gemma-2-2b, -9b, -27b"),
    Family("Gemma3ForCausalLM", "gemma3_text",
           "Gemma 3 (text): Gemma 2's norms, norms of q and k, five of six layers with a window and a base of theirs.",
           **_GEMMA_3,
           qk_norm=True, layer_fields=rules.GEMMA3_LAYERS, switches=_GEMMA_NORMS, numbers=(_GEMMA_SCALE, _LOGIT_CAP),
           defaults=_GEMMA_DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072,
                                       "sliding_window_pattern": 6},
           published="gemma-3-270m, -1b; in gemma-3-4b, -12b, -27b"),
    Family("Gemma4ForCausalLM", "gemma4_text",
           "Gemma 4 (text): normed values, wide heads in full layers; experts beside the MLP, or inputs by layer.",
           **_GEMMA_4, numbers=(_LOGIT_CAP, _PER_LAYER), experts=GEMMA4_EXPERTS,
           defaults=_GEMMA_4_DEFAULTS | {"hidden_size_per_layer_input": 256},
           published="in gemma-4-31B, -26B-A4B, -E2B, -E4B"),
    Family("Gemma4UnifiedForCausalLM", "gemma4_unified_text",
           "Gemma 4 (text, 12B): Gemma 4's layers without experts.",
           **_GEMMA_4, numbers=(_LOGIT_CAP,),
           defaults=_GEMMA_4_DEFAULTS | {"sliding_window": 1024, "max_position_embeddings": 262144},
           published="in gemma-4-12B"),
    Family("MuseGlimmerForCausalLM", "muse_glimmer_text",
           "Muse Glimmer (text): normed embeddings, gated attention, every fourth layer full and not rotated.",
           **ATTENTION_BIAS, qk_norm=True, names="muse", renamed={"hidden_act": "hidden_activation"},
           layer_fields=rules.MUSE_LAYERS,
           switches={"norms": "around", "norm_offset": "layers", "float32_norms": True, "embed_norm": True,
                     "qk_norm_has_weights": False, "gate": "sigmoid"},
           numbers=(_LOGIT_CAP, NumberField("qk_scale_factor", "q_factor"),
                    NumberField("output_multiplier", "logit_scale"), NumberField("post_norm_eps", "post_norm_eps")),
           unused_fields=frozenset({"hidden_act"}),
           defaults={"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
                     "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
                     "hidden_activation": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                     "tie_word_embeddings": False, "sliding_window": 2048, "final_logit_softcapping": 20.0,
                     "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8,
                     "bos_token_id": 200000, "eos_token_id": 200001},
           published="in Muse-Glimmer-30B"),
)  # fmt: skip

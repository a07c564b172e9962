"""Fixtures of families without experts, other than Gemma."""

from __future__ import annotations

from typing import Any

from hf_parity.case import FULL, SLIDING, SMALL, WINDOW, Case, default_rope

_COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
}  # fmt: skip

_LLAMA_AND_QWEN = {
    "llama3_tied": Case("llama", _COMMON | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "bos_token_id": 3, "eos_token_id": [126, 127],
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    }),
    "llama_biases_yarn": Case("llama", _COMMON | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "mlp_bias": True,
        "max_position_embeddings": 256, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                            "original_max_position_embeddings": 64},
    }),
    "qwen2_linear_sharded": Case("qwen2", _COMMON | {
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
    }, max_shard_size="60KB", old_format=True),
    "qwen2_tied": Case("qwen2", _COMMON | {
        "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }),
    "qwen3_yarn_tied": Case("qwen3", _COMMON | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "truncate": False,
                            "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 64},
    }),
    "qwen3_dynamic": Case("qwen3", _COMMON | {
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 64,
        "attention_bias": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    }),
    # The first layer is full, those after it slide.
    "qwen2_window": Case("qwen2", SMALL | {
        "num_hidden_layers": 3, "head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW,
        "max_window_layers": 1, "rope_parameters": default_rope(),
    }, old_format=True),
}  # fmt: skip

# Three quarters of a head of 16 are rotated: 12 dimensions, 6 frequencies. A head has hidden_size / heads dimensions.
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.35, 1.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}  # fmt: skip
_PHI3_LONGROPE = SMALL | {"hidden_size": 64, "tie_word_embeddings": True, "rope_parameters": _LONGROPE}

_PHI_AND_OTHERS = {
    "mistral_window": Case("mistral", SMALL | {
        "head_dim": 16, "sliding_window": WINDOW, "rope_parameters": default_rope(),
    }),
    "ministral3": Case("ministral3", SMALL | {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                            "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.25,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    }),
    "seed_oss": Case("seed_oss", SMALL | {
        "head_dim": 16, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
        "rope_parameters": default_rope(10000000.0),
    }),
    "phi3": Case("phi3", SMALL | {
        "hidden_size": 48, "sliding_window": WINDOW, "rope_parameters": default_rope(),
    }),
    # No sequence is longer than the original length.
    "phi3_longrope": Case("phi3", _PHI3_LONGROPE | {
        "original_max_position_embeddings": 160, "max_position_embeddings": 640,
    }, old_format=True),
    # Some prompts are longer, and some continuations get longer on their way.
    "phi3_crossing": Case("phi3", _PHI3_LONGROPE | {
        "original_max_position_embeddings": 48, "max_position_embeddings": 192,
    }),
    # The fourth layer is not rotated.
    "smollm3": Case("smollm3", SMALL | {
        "num_hidden_layers": 4, "head_dim": 8, "tie_word_embeddings": True, "rope_parameters": default_rope(5000000.0),
    }),
    "granite": Case("granite", SMALL | {
        "hidden_size": 48, "tie_word_embeddings": True, "embedding_multiplier": 1.7, "attention_multiplier": 0.35,
        "residual_multiplier": 0.6, "logits_scaling": 1.5, "rope_parameters": default_rope(),
    }),
    "ernie4_5": Case("ernie4_5", SMALL | {
        "head_dim": 16, "use_bias": True, "tie_word_embeddings": True, "rope_parameters": default_rope(500000.0),
    }),
    "glm4": Case("glm4", SMALL | {
        "head_dim": 16, "attention_bias": True, "eos_token_id": [2, 3, 4],
        "rope_parameters": default_rope(partial_rotary_factor=0.5),
    }),
    # Another theta by alpha, at every length; `head_dim` has to be given.
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", SMALL | {
        "head_dim": 16, "tie_word_embeddings": True, "use_qk_norm": True, "use_cla": False,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
    }, old_format=True),
}  # fmt: skip

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip

_POST_NORMS = {
    # Its full layer is not rotated.
    "exaone4": Case("exaone4", SMALL | {
        "num_hidden_layers": 4, "head_dim": 8, "max_position_embeddings": 1024, "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG", "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "rope_parameters": _LLAMA3,
    }),
    # Without windows, all layers are rotated.
    "exaone4_full": Case("exaone4", SMALL | {
        "head_dim": 16, "max_position_embeddings": 1024, "tie_word_embeddings": True, "sliding_window": None,
        "layer_types": [FULL, FULL], "rope_parameters": _LLAMA3,
    }, old_format=True),
    "olmo2": Case("olmo2", SMALL | {
        "hidden_size": 48, "rms_norm_eps": 1e-6, "rope_parameters": default_rope(500000.0),
    }),
    # The old format cannot say another theta for sliding layers.
    "olmo3": Case("olmo3", SMALL | {
        "num_hidden_layers": 4, "head_dim": 8, "rms_norm_eps": 1e-6, "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rope_parameters": {
            SLIDING: default_rope(500000.0),
            FULL: {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "beta_fast": 8.0, "beta_slow": 0.5,
                   "original_max_position_embeddings": 32, "attention_factor": 1.2079441541679836},
        },
    }, old_format=True),
}  # fmt: skip

_MUSE = {
    # Full layers are the first and the last: every fourth, counted from the last.
    "muse_glimmer": Case("muse_glimmer", {
        "text_config": SMALL | {
            "intermediate_size": 24, "num_hidden_layers": 5, "head_dim": 8, "sliding_window": WINDOW,
            "qk_scale_factor": 1.7, "output_multiplier": 0.8, "final_logit_softcapping": 3.0, "rms_norm_eps": 0.01,
            "post_norm_eps": 0.1, "rope_parameters": default_rope(),
        },
        "vision_config": {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
                          "patch_size": 2, "patch_temporal": 1, "merge_size": 1, "pos_emb_height": 2,
                          "pos_emb_width": 2},
        "out_hidden_size": 4, "projector_hidden_size": 4,
    }),
}  # fmt: skip

DENSE_CASES: dict[str, Case] = _LLAMA_AND_QWEN | _PHI_AND_OTHERS | _POST_NORMS | _MUSE

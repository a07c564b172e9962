"""Fixtures of Gemma 2, 3 and 4, with and without the wrappers that published checkpoints have."""

from __future__ import annotations

from hf_parity.case import FULL, SLIDING, SMALL, WINDOW, Case, default_rope
from hf_parity.routers import Routing

_GEMMA3 = SMALL | {
    "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 10, "tie_word_embeddings": True,
    "rope_parameters": {SLIDING: default_rope(),
                        FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}},
}  # fmt: skip

# Full layers: heads of 16, of which two of eight pairs are rotated, and one KV head whose keys are its values too.
_GEMMA4 = SMALL | {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "rope_parameters": {SLIDING: default_rope(),
                        FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}},
}  # fmt: skip
# Gemma 4 has embeddings for each layer where these fields do not say otherwise.
_NO_LAYER_EMBEDDINGS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 101}

# Tensors of the layers 3 to 5, which take keys and values of layers before them.
_SHARED = "model.language_model.layers.{}.self_attn.{}.weight"
_UNUSED: dict[str, tuple[int, ...]] = {
    _SHARED.format(layer, name): (head_dim,) if name == "k_norm" else (head_dim, 32)
    for layer, head_dim in ((3, 8), (4, 8), (5, 16))
    for name in ("k_proj", "v_proj", "k_norm")
}

GEMMA_CASES: dict[str, Case] = {
    # Layers slide and are full in turn.
    "gemma2": Case("gemma2", SMALL | {
        "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0, "tie_word_embeddings": True, "rope_parameters": default_rope(),
    }, old_format=True),
    # Every sixth layer is full.
    "gemma3": Case("gemma3_text", _GEMMA3 | {"num_hidden_layers": 6}),
    "gemma3_wrapped": Case("gemma3", {
        "text_config": _GEMMA3 | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window_pattern": 2},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 4, "intermediate_size": 4,
                          "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 4, "patch_size": 2,
                          "vision_use_head": False},
        "mm_tokens_per_image": 1, "tie_word_embeddings": True,
    }, old_format=True),
    # As 31B.
    "gemma4": Case("gemma4", {
        "text_config": _GEMMA4 | _NO_LAYER_EMBEDDINGS | {
            "model_type": "gemma4_text", "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
        "tie_word_embeddings": True,
    }),
    # As 26B-A4B.
    "gemma4_moe": Case("gemma4_text", _GEMMA4 | _NO_LAYER_EMBEDDINGS | {
        "intermediate_size": 24, "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL],
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 8,
    }, routing=Routing(top_k=2), old_format=True),
    # As E2B: the last three layers take keys and values of the second and the third, and their MLP is twice as wide.
    "gemma4_e2b": Case("gemma4", {
        "text_config": _GEMMA4 | {
            "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 6,
            "num_key_value_heads": 1, "layer_types": [SLIDING, SLIDING, FULL] * 2, "attention_k_eq_v": False,
            "num_global_key_value_heads": None, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101,
        },
        "tie_word_embeddings": True,
    }, old_format=True, unused=_UNUSED),
    "gemma4_unified": Case("gemma4_unified", {
        "text_config": _GEMMA4 | {
            "model_type": "gemma4_unified_text", "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL],
        },
        "tie_word_embeddings": True,
    }),
}  # fmt: skip

"""Families of diffusion models: of blocks whose tokens see each other, and of tokens that all see each other."""

from __future__ import annotations

from typing import Any

from jaxinfer.models import layer_fields as rules
from jaxinfer.models.dense_families import ATTENTION_BIAS, QWEN, QWEN_3
from jaxinfer.models.experts_fields import LLADA_EXPERTS
from jaxinfer.models.family import Family
from jaxinfer.models.sparse_families import LING_2, LING_FIELDS

# Settings of the trainer: expert parallelism, the loss, debug output, micro-batching, recomputation.
_SDAR_TRAINING = frozenset({
    "ep_size", "use_deepep", "fuse_cross_entropy", "debug", "micro_forward", "skip_checkpoint",
})  # fmt: skip
# Absent fields mean what they mean in the published code, even if `fixed` then refuses them.
_LLADA: dict[str, Any] = {
    "has_remote_code": True, "is_diffusion": True, "is_bidirectional": True, "has_padded_vocab": True, "names": "llada",
    "renamed": {
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size", "hidden_act": "activation_type",
        "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
    },
    "absent": frozenset({"head_dim", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}),
    "fixed": {
        "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "layer_norm_with_affine": True,
        "rope": True, "rope_full_precision": True, "block_group_size": 1,
    },
    "unused_fields": frozenset({
        "alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "residual_dropout",
        "flash_attention", "init_cutoff_factor", "init_device", "init_fn", "init_std", "precision", "mlp_ratio",
    }),
    "defaults": {
        "block_type": "sequential", "activation_type": "swiglu", "layer_norm_type": "default", "rope": False,
        "rms_norm_eps": 1e-5, "weight_tying": True, "mask_token_id": 126336, "eos_token_id": 126081,
    },
}  # fmt: skip
_LLADA_MOE: dict[str, Any] = ATTENTION_BIAS | {
    "qk_norm_field": "qk_layernorm", "experts": LLADA_EXPERTS, "has_remote_code": True, "is_diffusion": True,
    "is_bidirectional": True, "names": "llada_moe", "renamed": {"intermediate_size": "dense_intermediate_size"},
    "absent": frozenset({"head_dim", "rope_parameters"}),
    "fixed": {"partial_rotary_factor": 1},  # the published code reads an absent one as -1
    "unused_fields": frozenset({"intermediate_size", "output_router_logits", "router_aux_loss_coef"}),
    "defaults": {
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "mask_token_id": 156895, "eos_token_id": 156892,
    },
}  # fmt: skip

DIFFUSION_FAMILIES = (
    Family("SDARForCausalLM", "sdar",
           "SDAR: Qwen3's layers over blocks of tokens that see each other, a block-diffusion model.",
           **QWEN_3, layer_fields=rules.QWEN_LAYERS, has_remote_code=True, is_diffusion=True,
           unused_fields=_SDAR_TRAINING,
           defaults=QWEN | {"head_dim": 128, "block_size": 4, "mask_token_id": 151669,
                             "eos_token_id": [151645, 151643]},
           published="SDAR-1.7B to 8B-Chat"),
    Family("LLaDA2MoeModelLM", "llada2_moe",
           "LLaDA2: the layers of Ling 2.0 over blocks of tokens that see each other, a block-diffusion model.",
           frozenset({"llada2_moe_veomni"}), **LING_FIELDS, is_diffusion=True,
           defaults=LING_2 | {"block_size": 32, "mask_token_id": 156895, "partial_rotary_factor": 0.5},
           published="LLaDA2.0-mini"),
    Family("LLaDAModelLM", "llada",
           "LLaDA: Llama's layers over tokens that all see each other.",
           **_LLADA,
           published="LLaDA-8B"),
    Family("LLaDAMoEModelLM", "llada",
           "LLaDA-MoE: heads with norms, and experts that a softmax scores, over tokens that all see each other.",
           frozenset({"lladamoe"}), **_LLADA_MOE,
           published="LLaDA-MoE-7B-A1B"),
)  # fmt: skip

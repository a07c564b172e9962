"""Configurations of mixtures of experts as their publishers write them, and what of them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.experts_config import ExpertsConfig

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LING_LITE: dict[str, Any] = {
    "architectures": ["BailingMoeForCausalLM"], "attention_dropout": 0.0, "eos_token_id": 126081,
    "pad_token_id": 126081, "first_k_dense_replace": 0, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.006, "intermediate_size": 5632, "max_position_embeddings": 16384,
    "model_type": "bailing_moe", "moe_intermediate_size": 1408, "num_experts": 64, "num_shared_experts": 2,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_bias": False,
    "use_qkv_bias": False, "vocab_size": 126464, "embedding_dropout": 0.0, "norm_head": True, "norm_softmax": False,
    "output_dropout": 0.0, "auto_map": {"AutoModel": "modeling_bailing_moe.BailingMoeModel"},
}  # fmt: skip
LLADA2_MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0, "num_hidden_layers": 20, "hidden_size": 2048,
    "intermediate_size": 5120, "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768,
    "model_type": "llada2_moe", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "norm_head": False, "num_attention_heads": 16, "num_experts": 256, "num_key_value_heads": 4, "rope_theta": 600000,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False,
    "use_rmsnorm": True, "rms_norm_eps": 1e-06, "head_dim": 128, "num_shared_experts": 1, "use_cache": False,
    "use_qkv_bias": False, "embedding_dropout": 0.0, "norm_softmax": False, "output_dropout": 0.0,
    "vocab_size": 157184, "rotary_dim": 64, "using_split_qkv_in_self_attention": False, "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "score_function": "sigmoid", "initializer_range": 0.02, "max_window_layers": 28, "output_router_logits": False,
    "pad_token_id": 156892, "partial_rotary_factor": 0.5, "use_sliding_window": False,
}  # fmt: skip
LING_2 = LLADA2_MINI | {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe"}
GROUPED = ExpertsConfig(
    num_experts=256, experts_per_token=8, intermediate_size=512, shared_size=512, dense_layers=(0,), score="sigmoid",
    has_bias=True, scaling=2.5, num_groups=8, kept_groups=4,
)  # fmt: skip


def test_qwen3_moe():
    config = ModelConfig.from_hf(QWEN3_30B_A3B)
    assert config.experts == ExpertsConfig(num_experts=128, experts_per_token=8, intermediate_size=768)
    assert config.qk_norm and not config.qkv_bias and config.rotary_dim == 128
    assert all(config.is_sparse(layer) for layer in range(48))


def test_layers_of_qwen3_moe_without_experts():
    fields = QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = ModelConfig.from_hf(fields)
    assert [config.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]


def test_newer_transformers_call_the_number_of_experts_otherwise():
    fields = {**QWEN3_30B_A3B, "num_local_experts": 64}
    del fields["num_experts"]
    experts = ModelConfig.from_hf(fields).experts
    assert experts is not None and experts.num_experts == 64


def test_ling():
    config = ModelConfig.from_hf(LING_LITE)
    assert config.experts == ExpertsConfig(64, 6, 1408, shared_size=2816)
    assert config.normalizes_head and not config.qk_norm and config.head_dim == config.rotary_dim == 128
    assert (config.block_size, config.eos_token_ids) == (None, (126081,))


@pytest.mark.parametrize("fields", [{}, {"partial_rotary_factor": None}, {"rotary_dim": None}])
def test_ling_2_and_llada2_differ_by_blocks_alone(fields):
    ling, llada = ModelConfig.from_hf(LING_2 | fields), ModelConfig.from_hf(LLADA2_MINI | fields)
    for config in (ling, llada):
        assert config.experts == GROUPED and config.qk_norm and (config.rotary_dim, config.head_dim) == (64, 128)
        assert config.eos_token_ids == (156892,) and not config.normalizes_head
    assert (llada.block_size, llada.mask_token_id) == (32, 156895)
    assert (ling.block_size, ling.mask_token_id) == (None, None)


def test_a_model_type_of_two_architectures_is_not_enough():
    fields = {name: value for name, value in LING_2.items() if name != "architectures"}
    with pytest.raises(UnsupportedConfigError, match=r"BailingMoeForCausalLM or BailingMoeV2ForCausalLM"):
        ModelConfig.from_hf(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BailingHybridForCausalLM"], "model_type": "bailing_hybrid"}, "BailingHybridForCausalLM"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"linear_attn": True}, "linear_attn=True"),
        ({"norm_softmax": True}, "norm_softmax=True"),
        ({"using_split_qkv_in_self_attention": True}, "using_split_qkv_in_self_attention"),
        ({"score_function": "softmax"}, "score_function='softmax' with moe_router_enable_expert_bias=True"),
        ({"score_function": "tanh", "moe_router_enable_expert_bias": False}, "softmax, sigmoid, got 'tanh'"),
        ({"use_rmsnorm": False}, "use_rmsnorm"),
        ({"n_group": 3}, "n_group=3"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok=300"),
        ({"num_shared_experts": -1}, "num_shared_experts to an integer of at least 0"),
        ({"partial_rotary_factor": 0.03}, "partial_rotary_factor=0.03 of head_dim=128"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0 and at most 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields, message):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(LING_2 | fields)
    assert message in str(error.value)

"""Configurations of LLaDA and LLaDA-MoE as their publishers write them, and what of them is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxinfer.checkpoint.export import hf_config
from jaxinfer.checkpoint.weight_map import placements
from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.rope import RopeConfig

LLADA_8B: dict[str, Any] = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"}, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": 4096, "embedding_dropout": 0.0, "embedding_size": 126464,
    "eos_token_id": 126081, "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
    "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 126336,
    "max_sequence_length": 4096, "mlp_hidden_size": 12288, "mlp_ratio": 4, "model_type": "llada",
    "multi_query_attention": None, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "pad_token_id": 126081,
    "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": True, "rope_full_precision": True,
    "rope_theta": 500000.0, "scale_logits": False, "transformers_version": "4.46.3", "use_cache": False,
    "vocab_size": 126464, "weight_tying": False,
}  # fmt: skip
LLADA_MOE: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_lladamoe.LLaDAMoEModelLM"}, "clip_qkv": None, "dense_intermediate_size": 8192,
    "eos_token_id": 156892, "expert_intermediate_size": 1024, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "max_position_embeddings": 8192, "model_type": "llada", "moe_layer_freq": [1] * 16,
    "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax", "norm_topk_prob": None,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 156892, "partial_rotary_factor": 1,
    "qk_layernorm": True, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000,
    "routed_scaling_factor": 1, "router_aux_loss_coef": 0.01, "router_num_group": None, "router_topk_group": None,
    "shared_expert_intermediate_size": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": 157184,
}  # fmt: skip


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def test_llada_8b():
    config = ModelConfig.from_hf(LLADA_8B)
    assert config == ModelConfig(
        "LLaDAModelLM", 126464, 4096, 12288, 32, 32, 32, 128, 4096, rms_norm_eps=1e-5,
        rope=RopeConfig("default", 500000.0, 4096, 4096), mask_token_id=126336, eos_token_ids=(126081,),
    )  # fmt: skip
    assert sum(math.prod(placement.source_shape) for placement in placements(config)) == 8_015_581_184


def test_llada_moe():
    config = ModelConfig.from_hf(LLADA_MOE)
    assert config == ModelConfig(
        "LLaDAMoEModelLM", 157184, 2048, 8192, 16, 16, 16, 128, 8192, rms_norm_eps=1e-5, qk_norm=True,
        rope=RopeConfig("default", 50000.0, 8192, 8192), experts=ExpertsConfig(64, 8, 1024, normalizes=False),
        mask_token_id=156895, eos_token_ids=(156892,), dtype="bfloat16",
    )  # fmt: skip
    assert sum(math.prod(placement.source_shape) for placement in placements(config)) == 7_356_880_896


def test_masks_and_ends_follow_from_the_architecture():
    names = ("mask_token_id", "eos_token_id", "rope_theta")
    dense, sparse = (ModelConfig.from_hf(without(fields, *names)) for fields in (LLADA_8B, LLADA_MOE))
    assert (dense.mask_token_id, dense.eos_token_ids, dense.rope.theta) == (126336, (126081,), 10000.0)
    assert (sparse.mask_token_id, sparse.eos_token_ids, sparse.rope.theta) == (156895, (156892,), 50000.0)


def test_the_two_share_a_model_type_that_is_not_enough():
    with pytest.raises(UnsupportedConfigError, match=r"LLaDAModelLM or LLaDAMoEModelLM; config.json must say which"):
        ModelConfig.from_hf(without(LLADA_8B, "architectures"))


@pytest.mark.parametrize("fields", [LLADA_8B, LLADA_MOE])
def test_a_configuration_that_is_written_says_what_its_absence_would_change(fields):
    """The published code reads it and has other defaults."""
    written = hf_config(ModelConfig.from_hf(fields))
    assert FAMILIES[fields["architectures"][0]].fixed.items() <= written.items()
    assert {name: written[name] for name in ("rope_theta", "rms_norm_eps", "mask_token_id") if name in fields} == {
        name: fields[name] for name in ("rope_theta", "rms_norm_eps", "mask_token_id") if name in fields
    }


def test_they_see_everything_and_have_no_blocks():
    bidirectional = {name for name, family in FAMILIES.items() if family.is_bidirectional}
    assert bidirectional == {"LLaDAModelLM", "LLaDAMoEModelLM"}
    for fields in (LLADA_8B, LLADA_MOE):
        config = ModelConfig.from_hf(fields)
        assert config.is_bidirectional and config.block_size is None
        with pytest.raises(UnsupportedConfigError, match="block_size=32"):
            ModelConfig.from_hf(fields | {"block_size": 32})
    assert not ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]}).is_bidirectional


def test_there_may_be_more_embeddings_than_words():
    assert ModelConfig.from_hf(LLADA_8B | {"embedding_size": 126592}).vocab_size == 126592
    assert ModelConfig.from_hf(LLADA_8B | {"embedding_size": None}).vocab_size == 126464
    with pytest.raises(UnsupportedConfigError, match=r"embedding_size=126336 must be at least vocab_size=126464"):
        ModelConfig.from_hf(LLADA_8B | {"embedding_size": 126336})


def test_layers_of_llada_moe_without_experts():
    counts = [0, 1] * 8
    config = ModelConfig.from_hf(LLADA_MOE | {"moe_layer_freq": counts})
    assert [config.is_sparse(layer) for layer in range(16)] == [bool(count) for count in counts]
    assert config.intermediate_size == 8192
    fields = without(LLADA_MOE, "dense_intermediate_size")
    assert ModelConfig.from_hf(fields).intermediate_size == 1024
    with pytest.raises(UnsupportedConfigError, match="dense_intermediate_size to a positive integer, got None"):
        ModelConfig.from_hf(fields | {"moe_layer_freq": counts})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_type": "sequential"}, "block_type='sequential'"),
        ({"activation_type": "swiglu"}, "activation_type='swiglu'"),
        ({"activation_type": "gelu"}, "activation_type='gelu'"),
        ({"layer_norm_type": "default"}, "layer_norm_type='default'"),
        ({"layer_norm_with_affine": False}, "layer_norm_with_affine=False"),
        ({"rope": False}, "rope=False"),
        ({"rope_full_precision": False}, "rope_full_precision=False"),
        ({"block_group_size": 4}, "block_group_size=4"),
        ({"alibi": True}, "alibi=True"),
        ({"attention_layer_norm": True}, "attention_layer_norm=True"),
        ({"bias_for_layer_norm": True}, "bias_for_layer_norm=True"),
        ({"include_bias": True}, "include_bias=True"),
        ({"include_qkv_bias": True}, "include_qkv_bias=True"),
        ({"input_emb_norm": True}, "input_emb_norm=True"),
        ({"multi_query_attention": True}, "multi_query_attention=True"),
        ({"scale_logits": True}, "scale_logits=True"),
        ({"clip_qkv": 6.0}, "clip_qkv=6.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"head_dim": 64}, "head_dim=64"),
        ({"hidden_size": 64}, "hidden_size=64"),
        ({"d_model": None}, "d_model to a positive integer, got None"),
        ({"mlp_hidden_size": None}, "mlp_hidden_size to a positive integer, got None"),
        ({"n_heads": 30}, "n_heads=30 does not divide d_model=4096"),
        ({"weight_tying": "yes"}, "weight_tying to true or false, got 'yes'"),
        ({"mask_token_id": 126464}, "mask_token_id to a token of the vocabulary, got 126464"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_llada_may_say_and_is_not_computed_is_refused_by_name(fields, message):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(LLADA_8B | fields)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["block_type", "rope", "layer_norm_type", "activation_type"])
def test_a_field_that_is_absent_means_what_the_published_code_takes_it_for(name):
    with pytest.raises(UnsupportedConfigError, match=f"^{name}="):
        ModelConfig.from_hf(without(LLADA_8B, name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_qkv": 6.0}, "clip_qkv=6.0"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid'"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias=True"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),
        ({"router_num_group": 8}, "router_num_group=8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters="),
        ({"head_dim": 64}, "head_dim=64"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"moe_layer_freq": None}, "moe_layer_freq to 0 or 1 for each of 16 layers, got None"),
        ({"moe_layer_freq": [1] * 15}, "moe_layer_freq to 0 or 1 for each of 16 layers"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size to an integer of at least 0"),
        ({"expert_intermediate_size": None}, "expert_intermediate_size to a positive integer"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_llada_moe_may_say_and_is_not_computed_is_refused_by_name(fields, message):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(LLADA_MOE | fields)
    assert message in str(error.value)

"""Every field of a config.json is honoured or refused by name, and real files mean what they say."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from jaxinfer.checkpoint.weight_map import placements
from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.layers import ACTIVATIONS
from jaxinfer.models.rope import RopeConfig

MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
LLAMA, QWEN2, QWEN3 = MODEL_TYPES
ALL = tuple(MODEL_TYPES)


def tiny(architecture: str = LLAMA, **fields: Any) -> dict[str, Any]:
    """A small config.json of a family, with other fields set or replaced."""
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    } | fields


# What files of published checkpoints say, in the format that transformers wrote before version 5.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": [LLAMA], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "Llama-3.2-1B": {
        "architectures": [LLAMA], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "Qwen2.5-0.5B": {
        "architectures": [QWEN2], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen2.5-7B": {
        "architectures": [QWEN2], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        "architectures": [QWEN3], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-8B": {
        "architectures": [QWEN3], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


def llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(
        "llama3", 500000.0, 131072, 8192, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0
    )  # fmt: skip


def plain_rope(maximum: int) -> RopeConfig:
    return RopeConfig("default", 1000000.0, maximum, maximum)


UNDERSTOOD = {
    "Llama-3.1-8B": ModelConfig(
        LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, 131072, rms_norm_eps=1e-5, rope=llama3_rope(8.0),
        bos_token_id=128000, eos_token_ids=(128001, 128008, 128009), dtype="bfloat16",
    ),
    "Llama-3.2-1B": ModelConfig(
        LLAMA, 128256, 2048, 8192, 16, 32, 8, 64, 131072, rms_norm_eps=1e-5, rope=llama3_rope(32.0),
        tie_word_embeddings=True, bos_token_id=128000, eos_token_ids=(128001,), dtype="bfloat16",
    ),
    "Qwen2.5-0.5B": ModelConfig(
        QWEN2, 151936, 896, 4864, 24, 14, 2, 64, 32768, rope=plain_rope(32768), tie_word_embeddings=True,
        qkv_bias=True, bos_token_id=151643, eos_token_ids=(151643,), dtype="bfloat16",
    ),
    "Qwen2.5-7B": ModelConfig(
        QWEN2, 152064, 3584, 18944, 28, 28, 4, 128, 131072, rope=plain_rope(131072), qkv_bias=True,
        bos_token_id=151643, eos_token_ids=(151643,), dtype="bfloat16",
    ),
    "Qwen3-0.6B": ModelConfig(
        QWEN3, 151936, 1024, 3072, 28, 16, 8, 128, 40960, rope=plain_rope(40960), tie_word_embeddings=True,
        qk_norm=True, bos_token_id=151643, eos_token_ids=(151645,), dtype="bfloat16",
    ),
    "Qwen3-8B": ModelConfig(
        QWEN3, 151936, 4096, 12288, 36, 32, 8, 128, 40960, rope=plain_rope(40960), qk_norm=True,
        bos_token_id=151643, eos_token_ids=(151645,), dtype="bfloat16",
    ),
}  # fmt: skip

PARAMETER_COUNTS = {
    "Llama-3.1-8B": 8_030_261_248, "Llama-3.2-1B": 1_235_814_400, "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512, "Qwen3-0.6B": 596_049_920, "Qwen3-8B": 8_190_735_360,
}  # fmt: skip


def in_new_format(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as transformers 5 writes it."""
    values = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    values["rope_parameters"] = {"rope_type": "default"} | (hf.get("rope_scaling") or {})
    values["rope_parameters"]["rope_theta"] = hf["rope_theta"]
    values["dtype"] = hf["torch_dtype"]
    if hf["model_type"] != "llama":
        values["sliding_window"] = None
        values["layer_types"] = ["full_attention"] * hf["num_hidden_layers"]
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_understood(name):
    assert ModelConfig.from_hf(PUBLISHED[name]) == UNDERSTOOD[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_format_of_transformers_5_means_the_same(name):
    values = json.loads(json.dumps(in_new_format(PUBLISHED[name])))
    assert ModelConfig.from_hf(values) == UNDERSTOOD[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_the_published_number_of_parameters(name):
    found = placements(UNDERSTOOD[name])
    assert sum(math.prod(placement.source_shape) for placement in found) == PARAMETER_COUNTS[name]


REFUSED = [
    *((a, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config") for a in ALL),
    *((a, {"partial_rotary_factor": 0.5}, "partial_rotary_factor") for a in ALL),
    *((a, {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'") for a in ALL),
    *((a, {"hidden_act": None}, "hidden_act=None") for a in ALL),
    *((a, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0") for a in ALL),
    *((a, {"final_logit_softcapping": 30.0}, "final_logit_softcapping") for a in ALL),
    *((a, {"embedding_multiplier": 12.0}, "embedding_multiplier") for a in ALL),
    *((a, {"use_mrope": True}, "use_mrope") for a in ALL),
    *((a, {"num_experts": 8}, "num_experts") for a in ALL),
    *((a, {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config") for a in ALL),
    *((a, {"pruned_heads": {"0": [1]}}, "pruned_heads") for a in ALL),
    *((a, {"is_encoder_decoder": True}, "is_encoder_decoder") for a in ALL),
    *((a, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types") for a in ALL),
    *((a, {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention") for a in ALL),
    (LLAMA, {"sliding_window": 64}, "sliding_window=64"),
    (LLAMA, {"use_sliding_window": True}, "sliding_window"),
    (QWEN2, {"use_sliding_window": "yes"}, "use_sliding_window to true or false, got 'yes'"),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window to a positive integer, got 0"),
    (QWEN2, {"attention_bias": True}, "attention_bias"),
    (QWEN2, {"mlp_bias": True}, "mlp_bias"),
    (QWEN3, {"mlp_bias": True}, "mlp_bias"),
]


@pytest.mark.parametrize(("architecture", "fields", "named"), REFUSED)
def test_an_active_field_that_nothing_honours_is_refused_by_name(architecture, fields, named):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(tiny(architecture, **fields))
    assert named in str(error.value)


INACTIVE: list[dict[str, Any]] = [
    {"quantization_config": None},
    {"auto_map": {}},
    {"partial_rotary_factor": 1.0},
    {"partial_rotary_factor": None},
    {"attn_logit_softcapping": None},
    {"use_mrope": False},
    {"pruned_heads": {}},
    {"is_encoder_decoder": False},
    {"rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    {"layer_types": ["full_attention", "full_attention"]},
    {"attention_dropout": 0.1, "initializer_range": 0.5, "use_cache": False, "pretraining_tp": 4},
    {"sliding_window": None, "use_sliding_window": False},
    {"attention_bias": False, "mlp_bias": False},
    {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("fields", INACTIVE)
def test_a_field_that_changes_nothing_is_accepted(architecture, fields):
    assert ModelConfig.from_hf(tiny(architecture, **fields)) == ModelConfig.from_hf(tiny(architecture))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
    ],
)
@pytest.mark.parametrize("architecture", [QWEN2, QWEN3])
def test_a_sliding_window_that_covers_no_layer_is_accepted(architecture, fields):
    assert ModelConfig.from_hf(tiny(architecture, **fields)) == ModelConfig.from_hf(tiny(architecture))


HONOURED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    (QWEN3, {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    (LLAMA, {"mlp_bias": True}, {"mlp_bias": True}),
    *((a, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}) for a in ALL),
    *((a, {"hidden_act": name}, {"hidden_act": name}) for a in ALL for name in sorted(ACTIVATIONS)),
    *((a, {"rms_norm_eps": 1e-3}, {"rms_norm_eps": 1e-3}) for a in ALL),
    *((a, {"eos_token_id": [7, 9]}, {"eos_token_ids": (7, 9)}) for a in ALL),
    *((a, {"eos_token_id": 7, "bos_token_id": 1}, {"eos_token_ids": (7,), "bos_token_id": 1}) for a in ALL),
    *((a, {"num_key_value_heads": None}, {"num_kv_heads": 4}) for a in ALL),
    (LLAMA, {"head_dim": None}, {"head_dim": 16}),
    (LLAMA, {"eos_token_id": None, "bos_token_id": None}, {"eos_token_ids": (), "bos_token_id": None}),
    *((a, {"torch_dtype": "float16"}, {"dtype": "float16"}) for a in ALL),
    *((a, {"dtype": "float32", "torch_dtype": "float16"}, {"dtype": "float32"}) for a in ALL),
]


@pytest.mark.parametrize(("architecture", "fields", "changed"), HONOURED)
def test_a_field_is_honoured(architecture, fields, changed):
    plain = ModelConfig.from_hf(tiny(architecture))
    assert ModelConfig.from_hf(tiny(architecture, **fields)) == dataclasses.replace(plain, **changed)


def test_families_differ_in_biases_and_norms():
    shape = {a: ModelConfig.from_hf(tiny(a)) for a in ALL}
    assert [shape[a].qkv_bias for a in ALL] == [False, True, False]
    assert [shape[a].o_bias for a in ALL] == [False, False, False]
    assert [shape[a].qk_norm for a in ALL] == [False, False, True]


def test_absent_fields_have_the_defaults_of_their_family():
    llama = ModelConfig.from_hf({"architectures": [LLAMA]})
    assert (llama.vocab_size, llama.num_kv_heads, llama.head_dim, llama.eos_token_ids) == (32000, 32, 128, (2,))
    qwen3 = ModelConfig.from_hf({"model_type": "qwen3", "num_attention_heads": 64, "num_key_value_heads": 8})
    assert (qwen3.architecture, qwen3.head_dim, qwen3.eos_token_ids) == (QWEN3, 128, ())


ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_theta": 5e5}, {"theta": 5e5}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 5e5}, {"theta": 7.0}),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2}),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"rope_type": "dynamic", "factor": 2.0}),
    # transformers lets the older name win, and takes nothing from the other.
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 7.0}},
     {"rope_type": "linear", "factor": 2.0}),
    ({"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}},
     {"rope_type": "linear", "factor": 2.0}),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None, "truncate": False}},
     {"rope_type": "yarn", "factor": 4.0, "truncate": False}),
    ({"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
     {"rope_type": "yarn", "original_max_position_embeddings": 32}),
    # 0 means that the default counts.
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_slow": 0}},
     {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}),
    # One level up, the pretraining length has priority.
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
      "original_max_position_embeddings": 64},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "changed"), ROPES)
def test_rope_fields_are_honoured_in_both_formats(fields, changed):
    wanted = dataclasses.replace(
        RopeConfig(max_position_embeddings=128, original_max_position_embeddings=128), **changed
    )
    assert ModelConfig.from_hf(tiny(**fields)).rope == wanted


BAD_ROPES: list[tuple[dict[str, Any], str]] = [
    # transformers drops its cache where the keys turn for Phi-3 alone.
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
     "rope_type='longrope' is not supported; allowed: default, linear, dynamic, llama3, yarn, proportional"),
    ({"rope_scaling": {"rope_type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, "rope_type='su'"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type='mrope'"),
    ({"rope_scaling": {"type": "linear"}}, "needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "does not know factor"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "lacks factor"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ({"rope_theta": "big"}, "theta must be a positive number, got 'big'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), BAD_ROPES)
def test_rope_fields_that_nothing_honours_are_refused_by_name(fields, named):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(tiny(**fields))
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "unknown architecture FalconForCausalLM"),
        ({"architectures": None, "model_type": "falcon"}, "unknown architecture model_type='falcon'"),
        ({"architectures": [LLAMA], "model_type": "mistral"}, "model_type='mistral'"),
        ({"hidden_size": "64"}, "hidden_size to a positive integer, got '64'"),
        ({"vocab_size": 0}, "vocab_size to a positive integer, got 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers to a positive integer, got None"),
        ({"num_attention_heads": True}, "num_attention_heads to a positive integer, got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": None, "num_attention_heads": 6}, "does not divide hidden_size=64"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps to a positive number, got 'small'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings to true or false, got 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(fields, named):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(tiny(**fields))
    assert named in str(error.value)


def test_a_block_diffusion_model_has_blocks_and_a_mask():
    """Its publishers' code is not run, but what it computes is known here."""
    given = tiny(QWEN3) | {
        "architectures": ["SDARForCausalLM"], "model_type": "sdar", "auto_map": {"AutoModel": "modeling_sdar.SDAR"},
    }  # fmt: skip
    with pytest.raises(UnsupportedConfigError, match="mask_token_id to a token of the vocabulary, got 151669"):
        ModelConfig.from_hf(given)
    config = ModelConfig.from_hf(given | {"mask_token_id": 99})
    assert (config.block_size, config.mask_token_id, config.qk_norm) == (4, 99, True)
    config = ModelConfig.from_hf(given | {"vocab_size": 151936})
    assert (config.mask_token_id, config.eos_token_ids) == (151669, (151645, 151643))
    assert ModelConfig.from_hf(given | {"mask_token_id": 99, "block_size": 16}).block_size == 16
    with pytest.raises(UnsupportedConfigError, match="block_size"):
        ModelConfig.from_hf(given | {"mask_token_id": 99, "block_size": 0})
    with pytest.raises(UnsupportedConfigError, match="block_size"):
        ModelConfig.from_hf(tiny(QWEN3) | {"block_size": 4})

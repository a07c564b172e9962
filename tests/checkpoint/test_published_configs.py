"""Configurations as their publishers write them, with fields of their tools, are read as they are.

The files are transcribed by hand, not copied byte for byte; the published number of parameters confirms the sizes.
`llama-2-7b-sft` is no published model: it is Llama 2 with fields that training tools leave in the file. The lists of
longrope's divisors have the published lengths and made-up values.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from jaxinfer.checkpoint import read_config
from jaxinfer.checkpoint.weight_map import placements
from jaxinfer.models.config import UnsupportedConfigError

PUBLISHED = Path(__file__).resolve().parent.parent / "fixtures" / "configs" / "published"
PARAMETERS = {
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "ling-lite-1.5": 16_801_974_272,
    "ling-mini-2.0": 16_255_643_392,
    "llada-8b-instruct": 8_015_581_184,
    "llada-moe-7b-a1b-instruct": 7_356_880_896,
    "llada2.0-mini": 16_255_643_392,
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-2-7b-sft": 6_738_423_808,  # one word more
    "llama-3-8b-instruct": 8_030_261_248,
    "llama-3.1-8b-instruct": 8_030_261_248,
    "llama-3.2-1b-instruct-unsloth": 1_235_814_400,
    "qwen2-7b-instruct": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "sdar-8b-chat": 8_190_735_360,
    "smollm2-1.7b-instruct": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m-instruct": 361_821_120,
    "tinyllama-1.1b-chat": 1_100_048_384,
    "yi-6b": 6_061_035_520,
    "ernie-4.5-0.3b-pt": 360_748_032,
    "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "glm-4-9b-0414": 9_400_279_040,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "granite-3.3-8b-instruct": 8_170_864_640,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-base-2407": 12_247_782_400,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "phi-3-mini-4k-instruct": 3_821_079_552,
    "phi-3.5-mini-instruct": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini-instruct": 3_836_021_760,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "seed-oss-36b-instruct": 36_151_104_512,
    "smollm3-3b": 3_075_098_624,
    # Computed by hand from the sizes: published numbers are rounded. Of wrappers, the text model alone; without layers
    # that draft.
    "gemma-3-27b-it": 27_009_346_304,
    "gemma-4-31b": 30_697_345_340,
    "glm-4.5-air": 106_852_251_264,
    "hunyuan-mt2-7b": 7_504_568_320,
    "minimax-m2": 228_689_764_864,
    "ministral-3-3b-base-2512": 3_429_006_336,
    "ministral-3-8b-base-2512": 8_489_553_920,
    "olmo-2-1124-7b": 7_298_617_344,
    "olmo-3-1025-7b": 7_298_011_136,
}
IGNORED = {
    "smollm2-135m": {"is_llama_config"},
    "smollm2-360m-instruct": {"is_llama_config", "transformers.js_config"},
    "smollm2-1.7b-instruct": {"transformers.js_config"},
    "llama-2-7b-32k": {"auto_map"},
    "llama-2-7b-sft": {"neftune_noise_alpha", "_flash_attn_2_enabled", "pad_token"},
    "minimax-m2": {"auto_map"},
    "phi-3-mini-4k-instruct": {"auto_map"},
    "phi-3.5-mini-instruct": {"auto_map"},
    "phi-4-mini-instruct": {"auto_map"},
}
# Number of layers with a window, and the window.
WINDOWS = {
    "exaone-4.0-32b": (48, 4096),
    "gemma-2-9b": (21, 4096),
    "gemma-3-1b": (22, 512),
    "gemma-3-27b-it": (52, 1024),
    "gemma-4-31b": (50, 1024),
    "gpt-oss-120b": (18, 128),
    "gpt-oss-20b": (12, 128),
    "mistral-7b-v0.1": (32, 4096),
    "olmo-3-1025-7b": (24, 4096),
    "phi-3-mini-4k-instruct": (32, 2047),
    "phi-3.5-mini-instruct": (32, 262144),
    "phi-4-mini-instruct": (32, 262144),
}


def test_every_file_has_its_expectations():
    assert {path.name for path in PUBLISHED.iterdir()} == set(PARAMETERS) and len(PARAMETERS) >= 20


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_configuration_is_read_and_unknown_fields_are_named_once(name, caplog):
    caplog.set_level(logging.WARNING, logger="jaxinfer")
    values, config = read_config(PUBLISHED / name)
    sources = {placement.source: math.prod(placement.source_shape) for placement in placements(config)}
    assert sum(sources.values()) == PARAMETERS[name]
    ignored = IGNORED.get(name, set())
    assert len(caplog.records) == bool(ignored)
    text = "".join(record.getMessage() for record in caplog.records)
    assert {field for field in values if f" {field}=" in text} == ignored


@pytest.mark.parametrize("name", PARAMETERS)
def test_layers_have_the_published_windows(name):
    config = read_config(PUBLISHED / name)[1]
    count, window = WINDOWS.get(name, (0, None))
    windows = [layer.window for layer in config.all_layers if layer.window is not None]
    assert windows == [window] * count


@pytest.mark.parametrize("name", PARAMETERS)
def test_strict_reading_refuses_exactly_those_with_unknown_fields(name):
    ignored = IGNORED.get(name, set())
    if ignored:
        with pytest.raises(UnsupportedConfigError, match="strict_config refuses unknown fields") as error:
            read_config(PUBLISHED / name, strict_config=True)
        assert all(f" {field}=" in str(error.value) for field in ignored)
    config = read_config(PUBLISHED / name, strict_config=True, ignore_config_fields=ignored)[1]
    assert config == read_config(PUBLISHED / name)[1]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("smollm2-135m", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama-2-7b", {"activation": "swiglu"}, "activation='swiglu'"),
        ("llama-3-8b-instruct", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama-3.1-8b-instruct", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ("qwen2.5-0.5b", {"use_mrope": True}, "use_mrope=True"),
        ("qwen2-7b-instruct", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config="),
        ("sdar-8b-chat", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("sdar-8b-chat", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
         "16 of 36 layers have a window (sliding_window=4096)"),
        ("llada-8b-instruct", {"scale_logits": True}, "scale_logits=True"),
        ("llada2.0-mini", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("ling-mini-2.0", {"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token=2"),
        ("hunyuan-mt2-7b", {"use_cla": True}, "use_cla=True"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("minimax-m2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ("mixtral-8x7b-v0.1", {"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ("phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod=2"),
        ("smollm3-3b", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
    ],
)  # fmt: skip
def test_a_field_that_changes_the_output_is_refused_in_each_of_them(name, fields, message, tmp_path):
    values = json.loads((PUBLISHED / name / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedConfigError) as error:
        read_config(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "first"),
    [
        ("qwen2-7b-instruct", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}, 21),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 4096}, 0),
    ],
)
def test_a_window_that_is_switched_on_is_that_of_the_layers_from_some_number_on(name, fields, first, tmp_path):
    values = json.loads((PUBLISHED / name / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)[1]
    assert [layer.window for layer in config.layers] == [None] * first + [4096] * (config.num_layers - first)

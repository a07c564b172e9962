"""Configurations as their publishers write them, with fields of their tools, are read as they are.

The files are transcribed by hand, not copied byte for byte; the published number of parameters confirms the sizes.
`llama-2-7b-sft` is no published model: it is Llama 2 with fields that training tools leave in the file.
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
}
IGNORED = {
    "smollm2-135m": {"is_llama_config"},
    "smollm2-360m-instruct": {"is_llama_config", "transformers.js_config"},
    "smollm2-1.7b-instruct": {"transformers.js_config"},
    "llama-2-7b-32k": {"auto_map"},
    "llama-2-7b-sft": {"neftune_noise_alpha", "_flash_attn_2_enabled", "pad_token"},
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
        ("qwen2-7b-instruct", {"use_sliding_window": True, "max_window_layers": 21}, "gives 7 of 28 layers"),
        ("qwen2-7b-instruct", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config="),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 4096}, "gives 48 of 48 layers"),
        ("sdar-8b-chat", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("llada-8b-instruct", {"scale_logits": True}, "scale_logits=True"),
        ("llada2.0-mini", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("ling-mini-2.0", {"kv_lora_rank": 512}, "kv_lora_rank=512"),
    ],
)
def test_a_field_that_changes_the_output_is_refused_in_each_of_them(name, fields, message, tmp_path):
    values = json.loads((PUBLISHED / name / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedConfigError) as error:
        read_config(tmp_path)
    assert message in str(error.value)

"""Unknown fields of a `config.json`: one warning, or one refusal that names them; and what a user may decide."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.eagle3_config import Eagle3Config
from tests.checkpoint.heads import TARGET, head_config
from tests.models.test_config import ALL, LLAMA, QWEN2, QWEN3, tiny
from tests.models.test_llada_config import LLADA_8B
from tests.models.test_sparse_config import LING_LITE, LLADA2_MINI, QWEN3_30B_A3B

AUTO_MAP = {"AutoModelForCausalLM": "modeling_custom.Model"}
SDAR = tiny(QWEN3) | {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": 99}
SDAR_TRAINING = {
    "ep_size": 1, "fuse_cross_entropy": True, "debug": True, "micro_forward": True, "skip_checkpoint": True,
    "use_deepep": True,
}  # fmt: skip


@pytest.fixture
def warnings(caplog):
    """Texts of the warnings so far."""
    caplog.set_level(logging.WARNING, logger="jaxinfer")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("architecture", ALL)
def test_fields_that_the_reference_cannot_read_are_named_in_one_warning(architecture, warnings):
    fields = {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "_flash_attn_2_enabled": True}
    assert ModelConfig.from_hf(tiny(architecture, **fields)) == ModelConfig.from_hf(tiny(architecture))
    [text] = warnings()
    assert text.startswith(f"{architecture} ignores fields of config.json: is_llama_config=True (nothing in ")
    assert "transformers.js_config={'dtype': 'q4'} (no Python code" in text and "_flash_attn_2_enabled=True" in text


def test_known_and_inactive_fields_are_not_worth_a_warning(warnings):
    ModelConfig.from_hf(tiny(rope_interleaved=False, pad_token=None, pretraining_tp=2, unsloth_version="2025.1"))
    assert warnings() == []


def test_a_long_value_is_cut_short_in_messages(warnings):
    ModelConfig.from_hf(tiny(notes="word " * 1000))
    assert len(warnings()[0]) < 200


@pytest.mark.parametrize("architecture", [*ALL, "Qwen3MoeForCausalLM"])
def test_code_that_comes_with_a_checkpoint_is_ignored_where_the_reference_has_its_own(architecture, warnings):
    hf = QWEN3_30B_A3B if architecture == "Qwen3MoeForCausalLM" else tiny(architecture)
    assert ModelConfig.from_hf(hf | {"auto_map": AUTO_MAP}) == ModelConfig.from_hf(hf)
    [text] = warnings()
    assert "auto_map=" in text and "code that comes with a checkpoint is never run" in text
    with pytest.raises(UnsupportedConfigError, match="auto_map=.*strict_config refuses unknown fields"):
        ModelConfig.from_hf(hf | {"auto_map": AUTO_MAP}, strict_config=True)


@pytest.mark.parametrize("hf", [SDAR, LLADA_8B, LLADA2_MINI, LING_LITE])
def test_families_whose_code_is_written_anew_here_need_no_warning_about_it(hf, warnings):
    ModelConfig.from_hf(hf | {"auto_map": AUTO_MAP}, strict_config=True)
    assert warnings() == []


def test_a_refusal_names_field_value_reason_and_how_to_go_on():
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(tiny(rope_interleaved=True))
    assert str(error.value) == (
        "config.json sets rope_interleaved=True (its name contains 'rope', which usually means a computation), which "
        "LlamaForCausalLM here does not know; if the model's output does not depend on it, remove the field or pass "
        "ignore_config_fields=['rope_interleaved'] (--ignore-config-field rope_interleaved)"
    )


def test_a_refusal_names_all_fields_at_once_and_none_that_may_be_ignored():
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(tiny(layer_norm_eps=1e-5, is_llama_config=True, activation="swiglu"))
    assert "layer_norm_eps=1e-05 (other models" in str(error.value) and "is_llama_config" not in str(error.value)
    assert "ignore_config_fields=['layer_norm_eps', 'activation']" in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        (LLAMA, {"sliding_window": 4096}, "transformers' shared code reads it"),
        (LLAMA, {"use_sliding_window": True}, "other models of transformers compute something by that name"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 262144}}, "contains 'attention_'"),
        (QWEN3, {"use_mrope": True}, "contains 'rope'"),
        (QWEN3, {"num_experts": 8}, "other models of transformers compute something by that name"),
    ],
)
def test_a_user_may_decide_that_a_refused_field_does_not_matter(architecture, fields, reason, warnings):
    [name] = fields
    with pytest.raises(UnsupportedConfigError, match=rf"{name}=.*{reason}.*ignore_config_fields=\['{name}'\]"):
        ModelConfig.from_hf(tiny(architecture, **fields))
    config = ModelConfig.from_hf(tiny(architecture, **fields), ignore_config_fields=[name], strict_config=True)
    assert config == ModelConfig.from_hf(tiny(architecture))
    [text] = warnings()
    assert f"{name}=" in text and "ignore_config_fields names it" in text


def test_strict_reading_refuses_what_would_be_ignored():
    with pytest.raises(UnsupportedConfigError, match=r"is_llama_config=True \(strict_config refuses unknown fields\)"):
        ModelConfig.from_hf(tiny(is_llama_config=True), strict_config=True)
    with pytest.raises(UnsupportedConfigError, match=r"transformers\.js_config=.*strict_config refuses"):
        ModelConfig.from_hf(tiny(**{"transformers.js_config": {"dtype": "q4"}}), strict_config=True)
    assert ModelConfig.from_hf(tiny(attention_dropout=0.1), strict_config=True) == ModelConfig.from_hf(tiny())


def test_a_field_to_ignore_may_be_absent_or_known_to_change_nothing(warnings):
    config = ModelConfig.from_hf(tiny(), ignore_config_fields=("rope_interleaved", "attention_dropout"))
    assert config == ModelConfig.from_hf(tiny()) and warnings() == []


@pytest.mark.parametrize(
    ("hf", "name"),
    [
        (tiny(), "hidden_size"),
        (tiny(), "rope_theta"),
        (tiny(), "mlp_bias"),
        (tiny(), "quantization_config"),
        (tiny(QWEN2), "sliding_window"),
        (QWEN3_30B_A3B, "use_sliding_window"),
        (QWEN3_30B_A3B, "norm_topk_prob"),
        (LLADA_8B, "d_model"),
        (LLADA_8B, "rope_full_precision"),
        (SDAR, "mask_token_id"),
    ],
)
def test_a_field_that_is_read_cannot_be_ignored(hf: dict[str, Any], name):
    with pytest.raises(
        UnsupportedConfigError, match=f"ignore_config_fields names {name}, which {hf['architectures'][0]} reads"
    ):
        ModelConfig.from_hf(hf, ignore_config_fields=[name, "something_else"])


def test_a_single_name_is_no_list_of_names():
    with pytest.raises(ValueError, match="ignore_config_fields must be a list of names, got the string 'use_mrope'"):
        ModelConfig.from_hf(tiny(), ignore_config_fields="use_mrope")


def test_fields_of_sdars_training_change_nothing(warnings):
    assert ModelConfig.from_hf(SDAR | SDAR_TRAINING, strict_config=True) == ModelConfig.from_hf(SDAR)
    assert warnings() == []


@pytest.mark.parametrize("hf", [SDAR, LLADA_8B, LLADA2_MINI, LING_LITE])
def test_no_source_can_vouch_for_an_unknown_field_of_a_family_whose_code_comes_with_it(hf):
    with pytest.raises(UnsupportedConfigError, match="neftune_noise_alpha=5 .transformers has no model type"):
        ModelConfig.from_hf(hf | {"neftune_noise_alpha": 5})
    assert ModelConfig.from_hf(hf | {"neftune_noise_alpha": 5}, ignore_config_fields=["neftune_noise_alpha"])


def test_no_source_can_vouch_for_an_unknown_field_of_a_head(warnings):
    plain = Eagle3Config.from_hf(head_config(), TARGET)
    hf = head_config(is_llama_config=True, norm_before_fc=True)
    with pytest.raises(UnsupportedConfigError, match="is_llama_config=True .* and|norm_before_fc=True") as error:
        Eagle3Config.from_hf(hf, TARGET)
    assert "ignore_config_fields=['is_llama_config', 'norm_before_fc']" in str(error.value)
    assert Eagle3Config.from_hf(hf, TARGET, ignore_config_fields=["is_llama_config", "norm_before_fc"]) == plain
    assert len(warnings()) == 1
    with pytest.raises(UnsupportedConfigError, match="ignore_config_fields names draft_vocab_size"):
        Eagle3Config.from_hf(head_config(), TARGET, ignore_config_fields=["draft_vocab_size"])

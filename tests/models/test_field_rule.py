"""The rule for unknown fields, tried on fields of published files, by the source of the installed transformers."""

import subprocess
import sys

import pytest

from jaxinfer.models.families import FAMILIES
from jaxinfer.models.field_rule import is_known_type, verdict

REFUSED = [
    ("llama", "rope_interleaved", 6, "'rope'"),
    ("qwen2", "use_mrope", 6, "'rope'"),
    ("qwen3", "Attention_Scale", 6, "'scal'"),
    ("llama", "attention_logit_softcapping", 6, "'softcap'"),
    ("llama", "attn_logit_softcapping", 5, "other models of transformers compute something"),
    ("llama", "layer_norm_eps", 5, "other models of transformers compute something"),
    ("llama", "use_sliding_window", 5, "other models of transformers compute something"),
    ("llama", "mlp_ratio", 5, "other models of transformers compute something"),
    ("llama", "sliding_window", 4, "shared code reads it"),
    # One of each shared file, which no other of them names.
    ("qwen2", "mtp_layer_types", 4, "shared code reads it"),
    ("qwen2", "long_factor", 4, "shared code reads it"),
    ("qwen2", "block_sequence_ids", 4, "shared code reads it"),
    ("qwen2", "kv_sharing_modes", 4, "shared code reads it"),
    # Configuration classes do not declare these four.
    ("glm4_moe", "head_dim", 3, "glm4_moe in transformers computes with it"),
    ("minimax_m2", "rotary_dim", 3, "minimax_m2 in transformers computes with it"),
    ("gemma4_text", "global_head_dim", 3, "gemma4_text in transformers computes with it"),
    ("gemma3_text", "rope_local_base_freq", 3, "gemma3_text in transformers computes with it"),
    ("gemma3_text", "_sliding_window_pattern", 3, "gemma3_text in transformers computes with it"),
    ("sdar", "anything", 2, "no model type 'sdar'"),
    ("sdar", "_anything", 2, "no model type 'sdar'"),
]
WARNED = [
    ("llama", "is_llama_config", 7, "nothing in transformers"),
    ("llama", "neftune_noise_alpha", 7, "nothing in transformers"),
    ("llama", "pad_token", 7, "nothing in transformers"),
    ("llama", "use_flash_attention", 7, "nothing in transformers"),
    ("hunyuan_v1_dense", "use_cla", 7, "nothing in transformers"),
    ("llama", "transformers.js_config", 1, "no Python code"),
    ("sdar", "transformers.js_config", 1, "no Python code"),
    ("llama", "_flash_attn_2_enabled", 1, "private"),
]


@pytest.mark.parametrize(("model_type", "name", "step", "reason"), REFUSED)
def test_a_field_that_may_change_the_output_is_refused(model_type, name, step, reason):
    found = verdict(model_type, name)
    assert (found.step, found.refuses) == (step, True) and reason in found.reason


@pytest.mark.parametrize(("model_type", "name", "step", "reason"), WARNED)
def test_a_field_that_the_reference_cannot_read_is_not_refused(model_type, name, step, reason):
    found = verdict(model_type, name)
    assert (found.step, found.refuses) == (step, False) and reason in found.reason


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_transformers_has_the_families_that_need_no_code_from_a_checkpoint(name):
    assert is_known_type(FAMILIES[name].model_type) is not FAMILIES[name].has_remote_code


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("field", ["hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"])
def test_no_field_that_a_family_reads_would_pass_as_unknown(name, field):
    """Would fail if a newer transformers kept its sources where the rule does not look."""
    assert verdict(FAMILIES[name].model_type, field).step in (3, 4)


def test_the_rule_imports_neither_transformers_nor_torch():
    code = """
import sys
from jaxinfer.models.config import ModelConfig
plain = {"architectures": ["LlamaForCausalLM"]}
from jaxinfer.models import field_rule
ModelConfig.from_hf(plain)
assert field_rule._configurations.cache_info().currsize == 0, "sources are read where no unknown field is set"
ModelConfig.from_hf(plain | {"is_llama_config": True})
assert field_rule._configurations.cache_info().currsize == 1
print(*{"transformers", "torch"} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""

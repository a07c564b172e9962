"""A head's configuration: which layers of its target it reads, what it has of its own, and what is refused by name."""

from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.eagle3_config import Eagle3Config, captured_layers, is_head
from jaxinfer.models.rope import RopeConfig
from tests.checkpoint.heads import TARGET, WORDS, head_config

IDS = "eagle_aux_hidden_state_layer_ids"


def config_of(changes: dict[str, Any] | None = None, target: ModelConfig = TARGET) -> Eagle3Config:
    return Eagle3Config.from_hf(head_config(target, **(changes or {})), target)


def test_a_published_configuration_gives_the_head_for_its_target():
    config = config_of()
    assert config.capture == (2, 4, 5) and config.num_features == 3 * TARGET.hidden_size
    assert config.draft_vocab_size == WORDS and config.target_hidden_size == TARGET.hidden_size
    assert not config.has_embeddings
    layer = config.layer
    assert (layer.num_layers, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (1, 4, 2, 6)
    assert layer.vocab_size == TARGET.vocab_size and layer.rms_norm_eps == 1e-5 and not layer.qk_norm


@pytest.mark.parametrize(
    ("architecture", "model_type", "qk_norm"),
    [
        ("LlamaForCausalLMEagle3", "llama", False),
        ("Eagle3LlamaForCausalLM", "llama", False),
        ("Eagle3LLamaforCausalLM", "llama", False),
        ("LlamaForCausalLM", "llama", False),
        ("Eagle3Qwen3ForCausalLM", "qwen3", True),
        ("Qwen3ForCausalLMEagle3", "qwen3", True),
    ],
)
def test_the_architectures_of_published_heads_are_known(architecture, model_type, qk_norm):
    hf = head_config(architectures=[architecture], model_type=model_type)
    assert is_head(hf)
    assert Eagle3Config.from_hf(hf, TARGET).layer.qk_norm is qk_norm


def test_models_are_no_heads():
    assert not is_head({"architectures": ["LlamaForCausalLM"], "vocab_size": 40})
    assert not is_head({"architectures": ["Qwen3ForCausalLM"]})


def test_rope_is_the_heads_own_and_turns_by_ten_thousand_where_it_does_not_say():
    assert TARGET.rope.theta == 10000.0
    other = ModelConfig.from_hf(
        {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "hidden_size": 22, "intermediate_size": 26,
         "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 1e6}
    )  # fmt: skip
    assert config_of(target=other).layer.rope == RopeConfig(
        max_position_embeddings=64, original_max_position_embeddings=64
    )
    assert config_of({"rope_theta": 5e5}, other).layer.rope.theta == 5e5
    linear = {"rope_type": "linear", "factor": 2.0}
    assert config_of({"rope_scaling": linear}, other).layer.rope.rope_type == "linear"


def test_without_a_draft_vocabulary_a_head_drafts_all_words():
    assert config_of({"draft_vocab_size": None}).draft_vocab_size == TARGET.vocab_size


def test_layers_named_at_the_top_are_those_whose_inputs_are_read():
    assert config_of({IDS: [1, 3, 7]}).capture == (1, 3, 7)


def test_layers_named_within_eagle_config_are_those_whose_outputs_are_read():
    assert config_of({"eagle_config": {IDS: [1, 3, 6]}}).capture == (2, 4, 7)
    # What SpecForge writes for its default, and what publishers have written out for a model of 94 layers.
    for layers, outputs in ((36, [1, 17, 32]), (94, [1, 46, 90])):
        named = captured_layers({"eagle_config": {IDS: outputs}}, layers)
        assert named == captured_layers({}, layers) == (2, layers // 2, layers - 3)


def test_both_fields_may_say_the_same():
    assert config_of({IDS: [2, 4, 7], "eagle_config": {IDS: [1, 3, 6]}}).capture == (2, 4, 7)
    with pytest.raises(UnsupportedConfigError, match=f"{IDS}=.*contradict"):
        config_of({IDS: [1, 3, 6], "eagle_config": {IDS: [1, 3, 6]}})


def test_any_number_of_layers_may_be_named():
    assert config_of({IDS: [0, 2, 3, 5, 7]}).num_features == 5 * TARGET.hidden_size


def test_a_flag_that_ties_tables_of_different_sizes_says_nothing():
    assert config_of({"tie_word_embeddings": True}) == config_of()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "LlamaForCausalLM is not the architecture"),
        ({"architectures": ["Eagle3Speculator"]}, "Eagle3Speculator is not the architecture.*LlamaForCausalLMEagle3"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM is not"),
        ({"model_type": "phi3"}, "model_type='phi3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"vocab_size": 41}, "vocab_size=41 is not its target's, which is 40"),
        ({"draft_vocab_size": 41}, "draft_vocab_size=41 is more than vocab_size=40"),
        ({"draft_vocab_size": 0}, "draft_vocab_size to a positive integer, got 0"),
        ({"target_hidden_size": 24}, "target_hidden_size=24 is not its target's hidden_size, which is 22"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states=4"),
        ({"draft_vocab_size": 40, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"fc_norm": True}, "fc_norm=True"),
        ({"norm_before_residual": True}, "norm_before_residual=True"),
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"norm_output": True}, "norm_output=True"),
        ({"bias": True}, "bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state=False"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc=True"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "eagle_config.parallel_draft_step=2"),
        ({"eagle_config": [1, 2]}, "eagle_config must be an object"),
        ({IDS: [2, 4, 8]}, r"\(2, 4, 8\) \(as config.json says\).*which has 8"),
        ({"eagle_config": {IDS: [1, 3, 7]}}, r"\(2, 4, 8\)"),
        ({IDS: [4, 2, 5]}, r"\(4, 2, 5\)"),
        ({IDS: [2, 2, 5]}, r"\(2, 2, 5\)"),
        ({IDS: []}, f"{IDS} must be a list"),
        ({IDS: ["2"]}, f"{IDS} must be a list"),
    ],
)
def test_what_is_not_computed_or_not_of_the_target_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        config_of(changes)


@pytest.mark.parametrize(("layers", "expected"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (36, (2, 18, 33))])
def test_eagle3_reads_a_low_a_middle_and_a_high_layer(layers, expected):
    assert captured_layers({}, layers) == expected


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_in_a_shallow_target_these_coincide(layers):
    with pytest.raises(UnsupportedConfigError, match=rf"EAGLE-3's choice.*which has {layers}"):
        captured_layers({}, layers)

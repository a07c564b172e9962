"""Text models inside of wrappers are read as they are alone, with the fields that hold for the whole wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.wrappers import WRAPPERS, needed_wrapper, text_fields, wrapper_of

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 100}
TEXTS = [(name, kind, text) for name, each in WRAPPERS.items() for kind, text in each.texts.items()]


def wrapped(name: str, text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The fields of a wrapper with encoders, around those of a text model."""
    own = {"architectures": [name], "model_type": WRAPPERS[name].model_type, "text_config": text}
    return own | {"vision_config": {"hidden_size": 4, "rope_theta": 1.0}, "image_token_id": 9} | fields


@pytest.mark.parametrize(("name", "kind", "text"), TEXTS)
def test_a_text_model_in_its_wrapper_is_the_one_alone(name, kind, text):
    alone = ModelConfig.from_hf({"architectures": [text], "model_type": kind} | SMALL)
    hf = wrapped(name, {"model_type": kind} | SMALL)
    assert ModelConfig.from_hf(hf) == alone
    del hf["architectures"]
    assert ModelConfig.from_hf(hf) == alone
    # A name of the text model that the wrapper's publisher wrote down does not matter.
    assert ModelConfig.from_hf(hf | {"text_config": hf["text_config"] | {"architectures": None}}) == alone


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_text_model_without_a_type_is_the_usual_one(name):
    [usual, *_] = WRAPPERS[name].texts.values()
    assert ModelConfig.from_hf(wrapped(name, SMALL)).architecture == usual


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("text", [None, "gemma3_text", {"model_type": "llama"}])
def test_other_text_models_are_refused_by_name(name, text):
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf(wrapped(name, text))
    kinds = ", ".join(WRAPPERS[name].texts)
    assert f"text_config of {WRAPPERS[name].model_type} must have one of the model types {kinds}" in str(error.value)


def test_ends_and_tied_embeddings_are_those_of_the_wrapper():
    text = {"model_type": "gemma3_text", "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True} | SMALL
    config = ModelConfig.from_hf(wrapped("Gemma3ForConditionalGeneration", text))
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == ((1,), 2, True)
    outer = {"eos_token_id": [1, 106], "bos_token_id": 3, "tie_word_embeddings": False}
    config = ModelConfig.from_hf(wrapped("Gemma3ForConditionalGeneration", text, **outer))
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == ((1, 106), 3, False)


def test_the_dtype_of_the_wrapper_counts_where_the_text_has_none():
    name = "Gemma3ForConditionalGeneration"
    assert ModelConfig.from_hf(wrapped(name, SMALL, torch_dtype="bfloat16")).dtype == "bfloat16"
    assert ModelConfig.from_hf(wrapped(name, SMALL | {"dtype": "float32"}, dtype="bfloat16")).dtype == "float32"


def test_a_quantized_wrapper_is_refused():
    with pytest.raises(UnsupportedConfigError, match="quantization_config is set"):
        ModelConfig.from_hf(
            wrapped("Mistral3ForConditionalGeneration", SMALL, quantization_config={"quant_method": "fp8"})
        )


def test_unknown_fields_of_a_text_model_are_judged_and_those_of_its_wrapper_are_not():
    name = "Gemma3ForConditionalGeneration"
    assert ModelConfig.from_hf(wrapped(name, SMALL, rope_interleaved=True)) == ModelConfig.from_hf(wrapped(name, SMALL))
    with pytest.raises(UnsupportedConfigError, match="config.json sets rope_interleaved=True"):
        ModelConfig.from_hf(wrapped(name, SMALL | {"rope_interleaved": True}))


def test_fields_of_a_text_model_alone_stay_as_they_are():
    hf = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "text_config": None}
    assert wrapper_of(hf) is None and text_fields(hf) == hf
    # Some text models' own files have the type of the wrapper.
    assert wrapper_of({"model_type": "gemma3"}) is None


def test_a_wrapper_is_needed_where_transformers_has_no_class_of_the_text_model():
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    alone = {text for name, kind, text in TEXTS if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) == text}
    assert {text for _, _, text in TEXTS if needed_wrapper(text) is None} == alone
    found = needed_wrapper("MuseGlimmerForCausalLM")
    assert found is not None and found[0] == "MuseGlimmerForConditionalGeneration"
    assert found[1].name_inside("model.layers.0.input_norm") == "model.language_model.layers.0.input_norm"
    assert found[1].name_inside("lm_head.weight") == "lm_head.weight"

"""Wrappers around text models: their configuration is taken out, and the tensors of what else they hold left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError

TEXT_CONFIG = "text_config"


@dataclass(frozen=True)
class Wrapper:
    """An architecture that holds a text model beside encoders of images or sound.

    Attributes:
        model_type: of the wrapper.
        texts: model types of the text models that it may hold -> the architectures that compute them here.
        prefixes: beginnings of the text model's tensors -> the beginnings that they have without the wrapper. The first
            that fits counts.
        left_out: patterns of names of the other tensors.
        is_needed: transformers has no class of the text model alone, so that it is exported in its wrapper.
    """

    model_type: str
    texts: Mapping[str, str]
    prefixes: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    is_needed: bool = False

    def name_inside(self, name: str) -> str:
        """Return the name within the wrapper of a tensor of the text model."""
        inside, alone = self.prefixes[0]
        return inside + name.removeprefix(alone) if name.startswith(alone) else name


_TOWERS = (
    "*vision_tower.*", "*audio_tower.*", "*multi_modal_projector.*", "*embed_vision.*", "*embed_audio.*",
    "*vision_model.*", "*vision_embedder.*", "*audio_embedder.*", "*merger.*", "*visual.*",
    "*vision_adapter.*", "*vision_projection.*",
)  # fmt: skip
# Names before and since version 5 of transformers.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper("gemma3", {"gemma3_text": "Gemma3ForCausalLM"}, _PREFIXES, _TOWERS),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4", {"gemma4_text": "Gemma4ForCausalLM"}, _PREFIXES, _TOWERS),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        "gemma4_unified", {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, _PREFIXES, _TOWERS
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3", {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, _PREFIXES, _TOWERS
    ),
    "MuseGlimmerForConditionalGeneration": Wrapper(
        "muse_glimmer", {"muse_glimmer_text": "MuseGlimmerForCausalLM"}, _PREFIXES, _TOWERS, is_needed=True
    ),
}  # fmt: skip
# Fields of a wrapper that hold for its text model: in any case, and where the text's own configuration lacks them.
_OUTER = ("tie_word_embeddings", "eos_token_id", "bos_token_id")
_SHARED = ("dtype", "torch_dtype", "quantization_config")


def needed_wrapper(text: str) -> tuple[str, Wrapper] | None:
    """Return the architecture and the wrapper without which transformers knows no text model of this architecture."""
    return next(
        ((name, each) for name, each in WRAPPERS.items() if each.is_needed and text in each.texts.values()), None
    )


def wrapper_of(hf: Mapping[str, Any]) -> Wrapper | None:
    """Return the wrapper that a `config.json` describes; None: it is that of a text model."""
    for name in hf.get("architectures") or []:
        if name in WRAPPERS:
            return WRAPPERS[name]
    by_type = {wrapper.model_type: wrapper for wrapper in WRAPPERS.values()}
    return None if hf.get("architectures") or TEXT_CONFIG not in hf else by_type.get(str(hf.get("model_type")))


def text_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a text model's `config.json`: those inside of a wrapper, or all.

    Raises:
        UnsupportedConfigError: a wrapper holds no text model that is computed here.
    """
    wrapper = wrapper_of(hf)
    if wrapper is None:
        return dict(hf)
    text = hf.get(TEXT_CONFIG)
    kind = str(text.get("model_type", next(iter(wrapper.texts)))) if isinstance(text, Mapping) else "none"
    if not isinstance(text, Mapping) or kind not in wrapper.texts:
        raise UnsupportedConfigError(
            f"{TEXT_CONFIG} of {wrapper.model_type} must have one of the model types {', '.join(wrapper.texts)}, "
            f"got {kind!r}"
        )
    given = {name: hf[name] for name in (*_OUTER, *_SHARED) if hf.get(name) is not None}
    shared = {name: value for name, value in given.items() if name in _OUTER or text.get(name) is None}
    return {**text, **shared, "architectures": [wrapper.texts[kind]]}

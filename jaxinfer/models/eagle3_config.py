"""Configurations of EAGLE-3 heads: a head's `config.json` and its target in, one frozen dataclass out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.field_rule import verdict
from jaxinfer.models.layer_fields import FULL
from jaxinfer.models.unknown_fields import ConfigOptions, sifted

# Architectures of heads, and the family whose layer each has. The last entry of a family is its usual name.
HEAD_ARCHITECTURES = {
    "Eagle3Qwen3ForCausalLM": "Qwen3ForCausalLM",
    "Qwen3ForCausalLMEagle3": "Qwen3ForCausalLM",
    "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
    "LlamaForCausalLMEagle3": "LlamaForCausalLM",
}
# Early heads name the family itself as their architecture; only this field tells them from its models.
DRAFT_VOCABULARY = "draft_vocab_size"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# A head's own fields that are read here.
_OWN = frozenset({
    DRAFT_VOCABULARY, LAYER_IDS, "target_hidden_size", "num_aux_hidden_states", "eagle_config", "tie_word_embeddings",
    "num_hidden_layers",
})  # fmt: skip
# Other fields of `eagle_config`, each with the only value that is supported here.
_COMPUTED = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that determines a head's computation.

    Attributes:
        layer: sizes, rope and norms of the head itself, which has one layer; its vocabulary is the target's.
        draft_vocab_size: number of tokens that it can draft.
        target_hidden_size: hidden size of the target.
        capture: ascending numbers of the target's layers whose inputs are the features.
        has_embeddings: whether it has its own embedding table; else it reads the target's.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    capture: tuple[int, ...]
    has_embeddings: bool = False

    @property
    def num_features(self) -> int:
        """Features of a token, as `Eagle3Head.project` takes them."""
        return len(self.capture) * self.target_hidden_size

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], target: ModelConfig, **options: Unpack[ConfigOptions]) -> Eagle3Config:
        """The configuration that a head's `config.json` describes, for a target.

        Only the weights tell whether the head has its own embeddings: `has_embeddings` is False here.

        Args:
            options: about unknown fields, see `head_fields`.

        Raises:
            UnsupportedConfigError: it is not a head, it is a head of another target, or no code here honours an active
                field; the message names the field.
        """
        hf = head_fields(hf, **options)
        layer, words = head_layer(hf), draft_vocab_size(hf)
        if layer.vocab_size != target.vocab_size:
            raise UnsupportedConfigError(
                f"the head's vocab_size={layer.vocab_size} is not its target's, which is {target.vocab_size}"
            )
        width = hf.get("target_hidden_size")
        if width not in (None, target.hidden_size):
            raise UnsupportedConfigError(
                f"the head's target_hidden_size={width} is not its target's hidden_size, which is {target.hidden_size}"
            )
        capture = captured_layers(hf, target.num_layers)
        count = hf.get("num_aux_hidden_states")
        if count not in (None, len(capture)):
            raise UnsupportedConfigError(f"num_aux_hidden_states={count}, but the head's layers are {capture}")
        return cls(layer, words, target.hidden_size, capture)


def is_head(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head, supported or not."""
    return hf.get(DRAFT_VOCABULARY) is not None or any("eagle3" in name.lower() for name in _architectures(hf))


def head_fields(hf: Mapping[str, Any], **options: Unpack[ConfigOptions]) -> dict[str, Any]:
    """Return the fields of a head's `config.json` without the unknown ones that `options` ignore.

    transformers implements no heads, so its source cannot tell what an unknown field does: all others are refused.

    Raises:
        UnsupportedConfigError, ValueError: as for `accepted_fields`.
    """
    family = FAMILIES[_family(hf)]
    return sifted(
        hf, "an EAGLE-3 head", read=family.read_fields | _OWN, known=family.known_fields | _OWN,
        judge=lambda name: verdict("eagle3", name), **options,
    )  # fmt: skip


def head_layer(hf: Mapping[str, Any]) -> ModelConfig:
    """Sizes, rope and norms of a head from its `config.json`; its rope may differ from the target's.

    Raises:
        UnsupportedConfigError: see `Eagle3Config.from_hf`.
    """
    family, hf = _family(hf), head_fields(hf)
    layers = hf.get("num_hidden_layers")
    if layers not in (None, 1):
        raise UnsupportedConfigError(f"num_hidden_layers={layers} is not supported: a head has one layer")
    for name, value in _nested(hf).items():
        if name != LAYER_IDS and value is not None and (name not in _COMPUTED or value != _COMPUTED[name]):
            raise UnsupportedConfigError(f"eagle_config.{name}={value!r} is not supported")
    # Tables of different sizes cannot be tied, whatever the field says: publishers copy it from the target.
    if hf.get("tie_word_embeddings") and draft_vocab_size(hf) == hf.get("vocab_size"):
        raise UnsupportedConfigError("tie_word_embeddings is not supported: a head has an output head of its own")
    shared = {name: value for name, value in hf.items() if name not in _OWN}
    if set(hf.get("layer_types") or ()) <= {FULL}:
        shared.pop("layer_types", None)  # publishers copy the target's, which has more layers
    layer = ModelConfig.from_hf(shared | {"architectures": [family], "num_hidden_layers": 1})
    if layer.has_windows:
        raise UnsupportedConfigError("use_sliding_window is not supported in a head")
    return layer


def draft_vocab_size(hf: Mapping[str, Any]) -> int:
    """Number of tokens that a head can draft; the target's whole vocabulary if its `config.json` does not say.

    Raises:
        UnsupportedConfigError: a size is not a positive integer, or the draft vocabulary is the larger one.
    """
    vocabulary, words = hf.get("vocab_size"), hf.get(DRAFT_VOCABULARY)
    words = vocabulary if words is None else words
    for name, value in (("vocab_size", vocabulary), (DRAFT_VOCABULARY, words)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedConfigError(f"a head's config.json must set {name} to a positive integer, got {value!r}")
    assert isinstance(vocabulary, int) and isinstance(words, int)
    if words > vocabulary:
        raise UnsupportedConfigError(f"{DRAFT_VOCABULARY}={words} is more than vocab_size={vocabulary}")
    return words


def captured_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of a target whose inputs a head reads: those that its `config.json` names, or EAGLE-3's.

    Raises:
        UnsupportedConfigError: they are not layers of the target, or not strictly ascending, like EAGLE-3's choice for
            a shallow target.
    """
    # The top-level field is vLLM's: a number means a layer's input. The one in eagle_config is SGLang's, written by
    # SpecForge and ModelOpt: a number means a layer's output, which is the input of the next layer.
    inputs, outputs = _ids(hf.get(LAYER_IDS), LAYER_IDS), _ids(_nested(hf).get(LAYER_IDS), f"eagle_config.{LAYER_IDS}")
    shifted = None if outputs is None else tuple(number + 1 for number in outputs)
    if inputs is not None and shifted is not None and inputs != shifted:
        raise UnsupportedConfigError(
            f"{LAYER_IDS}={inputs} and eagle_config.{LAYER_IDS}={outputs} contradict each other: the first are numbers "
            "of layers whose inputs are meant, the second of layers whose outputs are"
        )
    layers = inputs or shifted
    chosen = (2, num_layers // 2, num_layers - 3) if layers is None else layers
    if chosen[0] < 0 or chosen[-1] >= num_layers or any(a >= b for a, b in zip(chosen, chosen[1:], strict=False)):
        origin = "EAGLE-3's choice" if layers is None else "as config.json says"
        raise UnsupportedConfigError(
            f"the head reads the inputs of the layers {chosen} ({origin}), but these must be different layers of its "
            f"target, which has {num_layers}, in their order"
        )
    return chosen


def _architectures(hf: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in hf.get("architectures") or []]


def _family(hf: Mapping[str, Any]) -> str:
    names = _architectures(hf)
    # Publishers differ in capitalisation.
    families = {name.lower(): family for name, family in HEAD_ARCHITECTURES.items()}
    if hf.get(DRAFT_VOCABULARY) is not None:
        families["llamaforcausallm"] = "LlamaForCausalLM"
    for name in names:
        if name.lower() in families:
            return families[name.lower()]
    found = ", ".join(names) or f"model_type={hf.get('model_type')!r}"
    raise UnsupportedConfigError(
        f"{found} is not the architecture of an EAGLE-3 head that is supported; supported: "
        f"{', '.join(HEAD_ARCHITECTURES)}, LlamaForCausalLM with {DRAFT_VOCABULARY}"
    )


def _nested(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = hf.get("eagle_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise UnsupportedConfigError(f"eagle_config must be an object, got {nested!r}")
    return nested or {}


def _ids(value: Any, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if (
        not isinstance(value, (list, tuple))
        or not value
        or any(not isinstance(number, int) or isinstance(number, bool) for number in value)
    ):
        raise UnsupportedConfigError(f"{name} must be a list of numbers of layers, got {value!r}")
    return tuple(value)

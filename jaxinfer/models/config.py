"""Model configurations: Hugging Face's `config.json` in, one frozen dataclass out, nothing active ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.models.rope import RopeConfig


class UnsupportedConfigError(ValueError):
    """A checkpoint's configuration asks for something that this engine does not compute."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a decoder-only transformer's computation.

    Sizes count elements; `hidden_act` names the gate's activation; token ids of `eos_token_ids` end a generation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    block_size: int | None = None  # of a block-diffusion model: tokens that see each other
    mask_token_id: int | None = None  # that stands where such a model has no token yet
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedConfigError(
                f"num_attention_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.hidden_act not in ACTIVATION_NAMES:
            raise UnsupportedConfigError(
                f"hidden_act={self.hidden_act!r} is not supported; allowed: {', '.join(sorted(ACTIVATION_NAMES))}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """The configuration that a Hugging Face `config.json` describes.

        Raises:
            UnsupportedConfigError: unknown architecture, or an active field that no code here honours, by name.
        """
        family = _family_of(hf)
        values = {**family.defaults, **hf}
        _refuse_unknown(hf, family)
        _refuse_active(values, family)
        num_heads, hidden_size = _size(values, "num_attention_heads"), _size(values, "hidden_size")
        max_positions = _size(values, "max_position_embeddings")
        attention_bias = family.bias_fields and _flag(values, "attention_bias")
        return cls(
            architecture=family.architecture,
            vocab_size=_size(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(values, "intermediate_size"),
            num_layers=_size(values, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"],
            head_dim=_head_dim(values, hidden_size, num_heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=_positive(values, "rms_norm_eps"),
            rope=_rope_of(values, max_positions),
            hidden_act=values["hidden_act"],
            tie_word_embeddings=_flag(values, "tie_word_embeddings"),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias_field and _flag(values, "mlp_bias"),
            qk_norm=family.qk_norm,
            block_size=_size(values, "block_size") if family.is_diffusion else None,
            mask_token_id=_token(values, "mask_token_id") if family.is_diffusion else None,
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=_as_ids(values.get("eos_token_id")),
            dtype=values.get("dtype") or values.get("torch_dtype"),
        )


ACTIVATION_NAMES = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})


@dataclass(frozen=True)
class Family:
    """What distinguishes one Hugging Face architecture from its siblings, with that library's defaults."""

    architecture: str
    model_type: str
    qkv_bias: bool = False  # biases on q, k, v whatever the fields say
    bias_fields: bool = False  # `attention_bias` governs q, k, v and o
    mlp_bias_field: bool = False
    qk_norm: bool = False
    sliding_fields: bool = False
    has_remote_code: bool = False  # Hugging Face runs what comes with its checkpoints, which is written anew here
    is_diffusion: bool = False  # `block_size` and `mask_token_id` say how it generates
    defaults: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = _COMMON | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM", "llama", bias_fields=True, mlp_bias_field=True,
            defaults=_COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048,
                                "bos_token_id": 1, "eos_token_id": 2},
        ),
        Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, sliding_fields=True, defaults=_QWEN),
        Family("Qwen3ForCausalLM", "qwen3", bias_fields=True, qk_norm=True, sliding_fields=True,
               defaults=_QWEN | {"head_dim": 128}),
        Family("SDARForCausalLM", "sdar", bias_fields=True, qk_norm=True, sliding_fields=True, has_remote_code=True,
               is_diffusion=True,
               defaults=_QWEN | {"head_dim": 128, "block_size": 4, "mask_token_id": 151669,
                                 "eos_token_id": [151645, 151643]}),
    )
}  # fmt: skip

_READ = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "partial_rotary_factor", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "quantization_config", "auto_map",
})  # fmt: skip
# Fields that never change a forward pass at inference: training, bookkeeping, generation defaults that Hugging Face
# used to write here (generation_config.json is read instead), and pretraining_tp, which slices sums but not results.
_INERT = frozenset({
    "attention_dropout", "hidden_dropout", "initializer_range", "use_cache", "pretraining_tp", "transformers_version",
    "_name_or_path", "name_or_path", "_commit_hash", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "tokenizer_class", "prefix", "task_specific_params", "problem_type", "finetuning_task", "id2label", "label2id",
    "num_labels", "torchscript", "use_bfloat16", "tf_legacy_loss", "return_dict", "output_hidden_states",
    "output_attentions", "output_scores", "return_dict_in_generate", "tie_last_hidden_states", "is_decoder",
    "chunk_size_feed_forward", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "model_max_length", "max_sequence_length", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
})  # fmt: skip
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}  # fmt: skip


def _family_of(hf: Mapping[str, Any]) -> Family:
    names = hf.get("architectures") or []
    for family in FAMILIES.values():
        if family.architecture in names:
            # Hugging Face chooses the class by model_type, so a foreign one means other computations.
            if hf.get("model_type", family.model_type) != family.model_type:
                raise UnsupportedConfigError(
                    f"model_type={hf['model_type']!r} does not belong to {family.architecture}, whose is "
                    f"{family.model_type!r}"
                )
            return family
    if not names:
        for family in FAMILIES.values():
            if family.model_type == hf.get("model_type"):
                return family
    found = ", ".join(names) or f"model_type={hf.get('model_type')!r}"
    raise UnsupportedConfigError(f"unknown architecture {found}; supported: {', '.join(FAMILIES)}")


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedConfigError(f"config.json must set {name} to a positive integer, got {value!r}")
    return value


def _token(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _size(values, "vocab_size"):
        raise UnsupportedConfigError(f"config.json must set {name} to a token of the vocabulary, got {value!r}")
    return value


def _positive(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedConfigError(f"config.json must set {name} to a positive number, got {value!r}")
    return float(value)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedConfigError(f"config.json must set {name} to true or false, got {value!r}")
    return bool(value)


def _head_dim(values: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if values.get("head_dim") is not None:
        return _size(values, "head_dim")
    if hidden_size % num_heads:
        raise UnsupportedConfigError(
            f"config.json lacks head_dim, and num_attention_heads={num_heads} does not divide hidden_size={hidden_size}"
        )
    return hidden_size // num_heads


def _is_active(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {} and value != ""


def _refuse_unknown(hf: Mapping[str, Any], family: Family) -> None:
    known = _READ | _INERT
    if family.bias_fields:
        known = known | {"attention_bias"}
    if family.mlp_bias_field:
        known = known | {"mlp_bias"}
    if family.is_diffusion:
        known = known | {"block_size", "mask_token_id"}
    for name, value in hf.items():
        if name not in known and _is_active(value):
            raise UnsupportedConfigError(
                f"config.json sets {name}={value!r}, which {family.architecture} here does not know; "
                "remove the field if it does not change the model's output"
            )


def _refuse_active(values: Mapping[str, Any], family: Family) -> None:
    if _is_active(values.get("quantization_config")):
        raise UnsupportedConfigError("quantization_config is set: quantized checkpoints are not supported")
    if _is_active(values.get("auto_map")) and not family.has_remote_code:
        raise UnsupportedConfigError("auto_map is set: code that comes with a checkpoint is never run")
    if values.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedConfigError(f"partial_rotary_factor={values['partial_rotary_factor']} is not supported")
    window = values.get("sliding_window")
    layer_types = values.get("layer_types")
    if layer_types is not None:
        other = sorted(set(layer_types) - {"full_attention"})
        if other:
            raise UnsupportedConfigError(f"layer_types contains {', '.join(other)}; only full_attention is supported")
    elif family.sliding_fields:
        used = _flag(values, "use_sliding_window") and window is not None
        if used and values["max_window_layers"] < values["num_hidden_layers"]:
            raise UnsupportedConfigError(f"use_sliding_window with sliding_window={window} is not supported")
    elif window is not None or values.get("use_sliding_window"):
        raise UnsupportedConfigError(f"sliding_window={window} is not supported")


def _rope_of(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"  # the older name wins where both are set
    given = values.get(name) or {}
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"{name} must be an object, got {given!r}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedConfigError(f"{name} per layer type are not supported: {', '.join(given)}")
    scaling = {key: value for key, value in given.items() if value is not None}
    old_name = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", old_name)
    if rope_type not in _ROPE_KEYS:
        raise UnsupportedConfigError(f"rope_type={rope_type!r} is not supported; allowed: {', '.join(_ROPE_KEYS)}")
    theta = scaling.pop("rope_theta", values.get("rope_theta"))
    if scaling.pop("partial_rotary_factor", 1) != 1:
        raise UnsupportedConfigError(f"{name}.partial_rotary_factor other than 1 is not supported")
    # Hugging Face writes the pretraining length beside any type, here or one level up; only llama3 and yarn use it.
    original = scaling.pop("original_max_position_embeddings", None)
    original = values.get("original_max_position_embeddings") or original
    unknown = sorted(set(scaling) - _ROPE_KEYS[rope_type])
    if unknown:
        raise UnsupportedConfigError(f"rope_type={rope_type!r} does not know {', '.join(unknown)}")
    if rope_type == "yarn" and "factor" not in scaling and original is None:
        raise UnsupportedConfigError(f"{name} of rope_type='yarn' lacks factor")
    try:
        return RopeConfig(
            rope_type=rope_type,
            theta=10000.0 if theta is None else theta,
            max_position_embeddings=max_positions,
            original_max_position_embeddings=max_positions if original is None else original,
            **scaling,
        )
    except ValueError as error:
        raise UnsupportedConfigError(f"{name}: {error}") from error


def _as_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise UnsupportedConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return ids

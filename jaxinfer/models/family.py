"""A family of Hugging Face architectures as data: which fields it reads, what they mean, and what it always has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, size
from jaxinfer.models.experts_fields import ExpertsFields
from jaxinfer.models.layer_fields import LayerFields
from jaxinfer.models.rope_fields import RopeReading, rope_fields


def _same(value: float) -> float:
    return value


@dataclass(frozen=True)
class NumberField:
    """A number in `config.json` that is an attribute of `ModelConfig`; null is None."""

    field: str
    attribute: str
    read: Callable[[float], float] = _same
    write: Callable[[float], float] = _same
    is_size: bool = False  # an integer of which null means 0


@dataclass(frozen=True)
class ChoiceField:
    """A field of which each value means values of attributes of `ModelConfig`; the first value that fits is written."""

    field: str
    means: Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """Traits that distinguish one Hugging Face architecture from its siblings, with that library's defaults.

    `summary` begins with the models' name and a colon.
    """

    architecture: str
    model_type: str
    summary: str
    other_model_types: frozenset[str] = frozenset()
    other_architectures: frozenset[str] = frozenset()
    qkv_bias: bool = False  # q, k and v have biases whatever the fields say
    qkv_bias_fields: tuple[str, ...] = ()  # fields any of which gives q, k and v biases
    o_bias_fields: tuple[str, ...] = ()
    mlp_bias_field: str | None = None  # field that gives the MLP biases
    qk_norm: bool = False
    qk_norm_field: str | None = None  # field that says whether q and k are normed
    layer_fields: LayerFields | None = None  # None: all layers are equal, without windows
    rope: RopeReading = field(default_factory=RopeReading)
    has_norm_head: bool = False  # `norm_head` may ask for a normed output head
    has_nextn_layers: bool = False  # `num_nextn_predict_layers` drafting layers may follow; not computed
    experts: ExpertsFields | None = None
    names: str = "llama"  # tensor names of its checkpoints: a key of `checkpoint.names.NAMES`
    quantization: str | None = None  # `quant_method` of checkpoints whose weights are expanded when they are read
    has_remote_code: bool = False  # Hugging Face runs code from its checkpoints, reimplemented here
    is_diffusion: bool = False  # `mask_token_id` is the placeholder of tokens not known yet
    is_bidirectional: bool = False  # all tokens see each other, so there are no trained blocks
    has_padded_vocab: bool = False  # `embedding_size` may be above `vocab_size`
    scales_embeddings: bool = False  # embeddings are multiplied with the root of their size
    grows_queries: bool = False  # `llama_4_scaling_beta` among the rotary parameters makes queries grow
    switches: Mapping[str, Any] = field(default_factory=dict)  # attributes of `ModelConfig` that it always has
    numbers: tuple[NumberField, ...] = ()
    choices: tuple[ChoiceField, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)  # common name of a field -> this family's name
    absent: frozenset[str] = frozenset()  # common fields that this family does not read
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of which only one value is supported
    unused_fields: frozenset[str] = frozenset()  # further fields that change no forward pass, mostly of training
    defaults: Mapping[str, Any] = field(default_factory=dict)
    published: str = ""  # ids of published models, for the documentation

    @property
    def has_blocks(self) -> bool:
        """Whether it denoises blocks of the size it was trained for, which is `block_size`."""
        return self.is_diffusion and not self.is_bidirectional

    def name_of(self, name: str) -> str:
        """This family's name of a common field."""
        return self.renamed.get(name, name)

    @property
    def read_fields(self) -> frozenset[str]:
        """Fields of its configurations that are used, or refused if they ask for something unsupported."""
        return (_READ - self.absent - self.renamed.keys()) | self.own_fields

    @property
    def known_fields(self) -> frozenset[str]:
        """Fields of its configurations that are read here, and those that change no output."""
        # The `auto_map` of a family with remote code names the code that is reimplemented here.
        own_code = {"auto_map"} if self.has_remote_code else set()
        return self.read_fields | _INERT | self.unused_fields | own_code

    @property
    def own_fields(self) -> frozenset[str]:
        """Fields of its configurations that are read here and that some other families lack."""
        names = {*self.qkv_bias_fields, *self.o_bias_fields}
        names |= {name for name in (self.mlp_bias_field, self.qk_norm_field) if name}
        names |= {"rotary_dim"} if self.rope.has_partial else set()
        names |= {"norm_head"} if self.has_norm_head else set()
        names |= {"num_nextn_predict_layers"} if self.has_nextn_layers else set()
        names |= {"mask_token_id"} if self.is_diffusion else set()
        names |= {"block_size"} if self.has_blocks else set()
        names |= {"embedding_size"} if self.has_padded_vocab else set()
        names |= {each.field for each in (*self.numbers, *self.choices)}
        names |= {*self.renamed.values(), *self.fixed}
        names |= self.layer_fields.names if self.layer_fields else frozenset()
        return frozenset(names) | (self.experts.names if self.experts else frozenset())


def read_switches(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the attributes of `ModelConfig` that single fields of this family give.

    Raises:
        UnsupportedConfigError: a field has no such value; the message names it.
    """
    found: dict[str, Any] = {}
    for number in family.numbers:
        value = values.get(number.field)
        if number.is_size:
            found[number.attribute] = 0 if value is None else size(values, number.field, 0)
            continue
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0):
            raise UnsupportedConfigError(f"config.json must set {number.field} to a positive number, got {value!r}")
        if value is not None or number.attribute in _MAY_BE_NONE:
            found[number.attribute] = None if value is None else number.read(float(value))
    for choice in family.choices:
        value = values.get(choice.field)
        if isinstance(value, (list, dict)) or value not in choice.means:
            allowed = ", ".join(map(repr, choice.means))
            raise UnsupportedConfigError(f"{choice.field}={value!r} is not supported; allowed: {allowed}")
        found |= choice.means[value]
    if family.scales_embeddings:
        found |= {"embed_scale": float(values[family.name_of("hidden_size")]) ** 0.5, "rounds_embed_scale": True}
    if family.grows_queries:
        found["query_growth"] = _query_growth(values, family)
    return found


_MAY_BE_NONE = frozenset({"score_cap", "logit_cap", "attention_scale", "post_norm_eps"})


def _query_growth(values: Mapping[str, Any], family: Family) -> tuple[float, int] | None:
    given = rope_fields(values)[1] or family.rope.absent
    beta, original = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if beta is None:
        raise UnsupportedConfigError("rope_parameters lacks llama_4_scaling_beta, by which queries grow")
    if not isinstance(original, int) or original < 1:
        raise UnsupportedConfigError(
            "rope_parameters must set original_max_position_embeddings to a positive integer, beside "
            f"llama_4_scaling_beta, got {original!r}"
        )
    return (float(beta), original) if beta else None


def write_switches(config: Any, family: Family) -> dict[str, Any]:
    """Return the fields from which `read_switches` reads the attributes of a `ModelConfig`."""
    values: dict[str, Any] = {}
    for number in family.numbers:
        value = getattr(config, number.attribute)
        values[number.field] = None if value is None else number.write(value)
    for choice in family.choices:
        for written, means in choice.means.items():
            if all(getattr(config, name) == value for name, value in means.items()):
                values[choice.field] = written
                break
    return values


_READ = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "partial_rotary_factor", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "layer_types",
    "quantization_config",
})  # fmt: skip
# Fields that never change a forward pass at inference: training, bookkeeping, generation defaults that Hugging Face
# used to write here (generation_config.json is read instead), pretraining_tp, which splits sums without changing their
# results, and max_window_layers, which has no effect without use_sliding_window.
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
    "max_window_layers",
})  # fmt: skip

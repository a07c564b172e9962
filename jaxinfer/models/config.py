"""Model configurations: Hugging Face's `config.json` in, one frozen dataclass out, nothing active ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, flag, positive, size, token, token_ids
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.families import FAMILIES, Family, family_of, refuse_active
from jaxinfer.models.rope import RopeConfig
from jaxinfer.models.unknown_fields import accepted_fields


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a decoder-only transformer's computation.

    Sizes count elements. `hidden_act` names the gate's activation. A token of `eos_token_ids` ends a generation.
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
    normalizes_head: bool = False  # the output head's columns are divided by their norms when its weights are read
    experts: ExpertsConfig | None = None
    num_nextn_layers: int = 0  # further layers of the checkpoint, which draft tokens; not computed
    block_size: int | None = None  # block diffusion: tokens of a block, which see each other
    mask_token_id: int | None = None  # diffusion: placeholder of a token that is not known yet
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
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise UnsupportedConfigError(
                f"partial_rotary_factor={self.rope.partial_rotary_factor} of head_dim={self.head_dim} leaves no even "
                "number of dimensions to rotate"
            )
        if self.hidden_act not in ACTIVATION_NAMES:
            raise UnsupportedConfigError(
                f"hidden_act={self.hidden_act!r} is not supported; allowed: {', '.join(sorted(ACTIVATION_NAMES))}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return self.rope.rotary_dim(self.head_dim)

    @property
    def is_bidirectional(self) -> bool:
        """Whether every token sees all others, later ones included."""
        return FAMILIES[self.architecture].is_bidirectional

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], *, ignore_config_fields: Collection[str] = (), strict_config: bool = False
    ) -> ModelConfig:
        """The configuration that a Hugging Face `config.json` describes.

        An unknown field that the reference cannot read either is ignored; one warning names all such fields.

        Args:
            ignore_config_fields: names of unknown fields to ignore, which the caller knows to change no output.
            strict_config: refuse every unknown field.

        Raises:
            UnsupportedConfigError: the architecture is unknown, no code here honours an active field, or
                `ignore_config_fields` names a field that is read; the message names it.
        """
        family = family_of(hf)
        accepted = accepted_fields(hf, family, ignore_config_fields=ignore_config_fields, strict_config=strict_config)
        values = {**family.defaults, **accepted}
        refuse_active(values, family)
        name_of = family.name_of
        num_heads, kv_heads = size(values, name_of("num_attention_heads")), values.get(name_of("num_key_value_heads"))
        max_positions, head_dim = size(values, name_of("max_position_embeddings")), _head_dim(values, family)
        experts, vocab_size = None if family.experts is None else family.experts.read(values), _rows(values, family)
        biased = {name for name in (*family.qkv_bias_fields, *family.o_bias_fields) if flag(values, name)}
        return cls(
            architecture=family.architecture,
            vocab_size=vocab_size,
            hidden_size=size(values, name_of("hidden_size")),
            intermediate_size=_intermediate_size(values, family, experts),
            num_layers=size(values, name_of("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=num_heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=positive(values, "rms_norm_eps"),
            rope=_rope_of(values, max_positions, head_dim, family),
            hidden_act=values[name_of("hidden_act")],
            tie_word_embeddings=flag(values, name_of("tie_word_embeddings")),
            qkv_bias=family.qkv_bias or not biased.isdisjoint(family.qkv_bias_fields),
            o_bias=not biased.isdisjoint(family.o_bias_fields),
            mlp_bias=family.mlp_bias_field and flag(values, "mlp_bias"),
            qk_norm=family.qk_norm if family.qk_norm_field is None else flag(values, family.qk_norm_field),
            normalizes_head=family.has_norm_head and flag(values, "norm_head"),
            num_nextn_layers=size(values, "num_nextn_predict_layers", 0) if family.has_nextn_layers else 0,
            experts=experts,
            block_size=size(values, "block_size") if family.has_blocks else None,
            mask_token_id=token(values, "mask_token_id", vocab_size) if family.is_diffusion else None,
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=token_ids(values.get("eos_token_id")),
            dtype=values.get("dtype") or values.get("torch_dtype"),
        )


ACTIVATION_NAMES = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}  # fmt: skip


def _rows(values: Mapping[str, Any], family: Family) -> int:
    """Number of embeddings, which is the number of logits."""
    words = size(values, "vocab_size")
    if not family.has_padded_vocab or values.get("embedding_size") is None:
        return words
    rows = size(values, "embedding_size")
    if rows < words:
        raise UnsupportedConfigError(f"embedding_size={rows} must be at least vocab_size={words}")
    return rows


def _intermediate_size(values: Mapping[str, Any], family: Family, experts: ExpertsConfig | None) -> int:
    name = family.name_of("intermediate_size")
    # If all layers have experts, no layer has this size. Published configurations omit it or set it to -1.
    if experts is not None and not experts.dense_layers and values.get(name) in (None, -1):
        return experts.intermediate_size
    return size(values, name)


def _head_dim(values: Mapping[str, Any], family: Family) -> int:
    if values.get("head_dim") is not None:
        return size(values, "head_dim")
    heads, hidden = family.name_of("num_attention_heads"), family.name_of("hidden_size")
    num_heads, hidden_size = size(values, heads), size(values, hidden)
    if hidden_size % num_heads:
        raise UnsupportedConfigError(
            f"config.json lacks head_dim, and {heads}={num_heads} does not divide {hidden}={hidden_size}"
        )
    return hidden_size // num_heads


def _rope_of(values: Mapping[str, Any], max_positions: int, head_dim: int, family: Family) -> RopeConfig:
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
    partial = scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor")
    if partial is None and values.get("rotary_dim") is not None:
        partial = size(values, "rotary_dim") / head_dim
    if partial not in (None, 1) and not family.has_partial_rope:
        raise UnsupportedConfigError(f"partial_rotary_factor={partial} is not supported")
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
            partial_rotary_factor=1.0 if partial is None else partial,
            max_position_embeddings=max_positions,
            original_max_position_embeddings=max_positions if original is None else original,
            **scaling,
        )
    except ValueError as error:
        raise UnsupportedConfigError(f"{name}: {error}") from error

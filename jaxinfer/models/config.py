"""Model configurations: Hugging Face's `config.json` in, one frozen dataclass out, nothing active ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxinfer.models.config_fields import UnsupportedConfigError, flag, positive, size, token, token_ids
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.families import FAMILIES, family_of, refuse_active
from jaxinfer.models.family import Family, read_switches
from jaxinfer.models.layer_config import LayerConfig, kinds_of, main_rope
from jaxinfer.models.rope import RopeConfig
from jaxinfer.models.rope_fields import read_rope
from jaxinfer.models.unknown_fields import accepted_fields
from jaxinfer.models.wrappers import text_fields


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a decoder-only transformer's computation.

    Sizes count elements. `hidden_act` names the gate's activation. A token of `eos_token_ids` ends a generation.
    Attributes from `norms` to `layers` are switches, which are off in Llama.
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
    # Where a layer's norms are: before attention and MLP; after both, on what is added; or before and after.
    norms: Literal["before", "after", "around"] = "before"
    norm_offset: Literal["none", "layers", "all"] = "none"  # norms whose stored weights are the scale minus 1
    float32_norms: bool = False  # scales are float32, and the product with them is rounded after it
    post_norm_eps: float | None = None  # of the norms after attention and MLP; None: `rms_norm_eps`
    qk_norm_of: Literal["head", "all_heads", "rotated_head"] = "head"  # the last: after the rotation
    qk_norm_has_weights: bool = True
    q_factor: float = 1.0  # of queries, after their norm
    v_norm: bool = False  # values have a norm without weights
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    score_cap: float | None = None  # scores x become cap * tanh(x / cap)
    has_sinks: bool = False  # each head has a score without a value, which all tokens see
    gate: Literal["none", "sigmoid", "softplus"] = "none"  # of attention's result, before the output projection
    gate_of: Literal["element", "head"] = "element"
    query_growth: tuple[float, int] | None = None  # (beta, n): queries times 1 + beta * log(1 + floor(position / n))
    pairs_neighbours: bool = False  # in checkpoints, rotated dimensions are paired with their neighbours
    embed_scale: float = 1.0
    rounds_embed_scale: bool = False  # to the dtype of the weights
    embed_norm: bool = False  # embeddings have a norm without weights
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits x become cap * tanh(x / cap)
    per_layer_size: int = 0  # of an embedding that each token has for each layer; 0: none
    has_layer_scalar: bool = False  # a layer's whole output is multiplied by a weight
    layers: tuple[LayerConfig, ...] = ()  # if they differ from each other, or have windows
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
        if self.layers and len(self.layers) != self.num_layers:
            raise UnsupportedConfigError(f"{len(self.layers)} layers are described, but num_layers={self.num_layers}")
        _ = self.common_layer  # checks the geometry of heads
        windows = [layer.window for layer in self.layers if layer.window is not None]
        if self.mask_token_id is not None and windows:
            raise UnsupportedConfigError(
                f"{len(windows)} of {self.num_layers} layers have a window (sliding_window={windows[0]}), which is not "
                "supported in diffusion models"
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
    def common_layer(self) -> LayerConfig:
        """The layer that the common attributes describe."""
        return LayerConfig(self.num_heads, self.num_kv_heads, self.head_dim, self.rope)

    def layer(self, number: int) -> LayerConfig:
        """Return the description of a layer."""
        return self.layers[number] if self.layers else self.common_layer

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The description of every layer."""
        return self.layers or (self.common_layer,) * self.num_layers

    @property
    def kv_layers(self) -> tuple[LayerConfig, ...]:
        """The description of every layer that has keys and values of its own."""
        return tuple(layer for layer in self.all_layers if layer.kv_from is None)

    @property
    def kinds(self) -> tuple[LayerConfig, ...]:
        """What plans of attention depend on, each kind of layers once."""
        return kinds_of(self.layers or (self.common_layer,))

    @property
    def has_windows(self) -> bool:
        """Whether tokens of some layers do not see all before them."""
        return any(layer.window is not None for layer in self.layers)

    def with_num_layers(self, count: int) -> ModelConfig:
        """Return the configuration of a model of the first layers, or of more, which repeat them."""
        layers = tuple(self.layers[number % len(self.layers)] for number in range(count)) if self.layers else ()
        return replace(self, num_layers=count, layers=layers)

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
        hf = text_fields(hf)
        family = family_of(hf)
        accepted = accepted_fields(hf, family, ignore_config_fields=ignore_config_fields, strict_config=strict_config)
        values = {**family.defaults, **accepted}
        refuse_active(values, family)
        name_of = family.name_of
        num_heads, kv_heads = size(values, name_of("num_attention_heads")), values.get(name_of("num_key_value_heads"))
        max_positions, head_dim = size(values, name_of("max_position_embeddings")), _head_dim(values, family)
        values["max_position_embeddings"] = max_positions
        experts, vocab_size = None if family.experts is None else family.experts.read(values), _rows(values, family)
        biased = {name for name in (*family.qkv_bias_fields, *family.o_bias_fields) if flag(values, name)}
        kv_heads = num_heads if kv_heads is None else size(values, name_of("num_key_value_heads"))
        rope, layers = _layers_of(values, family, LayerConfig(num_heads, kv_heads, head_dim))
        return cls(
            architecture=family.architecture,
            vocab_size=vocab_size,
            hidden_size=size(values, name_of("hidden_size")),
            intermediate_size=_intermediate_size(values, family, experts),
            num_layers=size(values, name_of("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=positive(values, "rms_norm_eps"),
            rope=rope,
            layers=layers,
            hidden_act=values[name_of("hidden_act")],
            tie_word_embeddings=flag(values, name_of("tie_word_embeddings")),
            qkv_bias=family.qkv_bias or not biased.isdisjoint(family.qkv_bias_fields),
            o_bias=not biased.isdisjoint(family.o_bias_fields),
            mlp_bias=family.mlp_bias_field is not None and flag(values, family.mlp_bias_field),
            qk_norm=family.qk_norm if family.qk_norm_field is None else flag(values, family.qk_norm_field),
            normalizes_head=family.has_norm_head and flag(values, "norm_head"),
            num_nextn_layers=size(values, "num_nextn_predict_layers", 0) if family.has_nextn_layers else 0,
            experts=experts,
            block_size=size(values, "block_size") if family.has_blocks else None,
            mask_token_id=token(values, "mask_token_id", vocab_size) if family.is_diffusion else None,
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=token_ids(values.get("eos_token_id")),
            dtype=values.get("dtype") or values.get("torch_dtype"),
            **{**family.switches, **read_switches(values, family)},
        )


ACTIVATION_NAMES = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})


def _layers_of(
    values: Mapping[str, Any], family: Family, heads: LayerConfig
) -> tuple[RopeConfig, tuple[LayerConfig, ...]]:
    """Return the main rotation, and the layers if they are not all what the common fields describe."""
    rule = family.layer_fields
    if rule is None or not rule.reads_rope:
        heads = replace(heads, rope=read_rope(values, heads.head_dim, family.rope))
    layers = tuple(rule.read(values, heads)) if rule is not None else ()
    rope = main_rope(layers or (heads,)) or RopeConfig()
    return rope, () if all(layer == replace(heads, rope=rope) for layer in layers) else layers


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

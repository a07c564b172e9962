"""Rows of the weight map as data, of decoders and of EAGLE-3 heads, and the layouts that they are applied to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config


@dataclass(frozen=True)
class Row:
    """One source tensor: its name, its parameter, and how its axes are regrouped.

    `axes` reads "source axes -> parameter axes"; axes in parentheses are fused in the source. Sizes of the axes: v
    vocabulary, h hidden, f intermediate, kv key/value heads, g query heads per key/value head, d head dimension; of a
    head also p a pair of embedding and feature, n features, w words it drafts. The axis `slot` is where several sources
    share one parameter; `slot` names this source's share of it.
    """

    source: str
    target: str
    axes: str
    slot: str | None = None
    when: str | None = None  # only if this field of the configuration is true
    unless: str | None = None  # only if this field of the configuration is false
    offsets: bool = False  # token ids, int32; the source has each one less its own number


def _layer(hf: str, ours: str, inputs: str = "h") -> tuple[Row, ...]:
    """Attention, its norm behind it and the MLP of one layer, whose attention reads the axis `inputs`."""
    kernel, bias = f"(kv slot d) {inputs} -> kv slot d {inputs}", "(kv slot d) -> kv slot d"
    gate_up, attention, mlp = "(slot f) h -> f slot h", hf + "self_attn.", hf + "mlp."
    return (
        *(Row(f"{attention}{x}_proj.weight", ours + "attention.qkv.kernel", kernel, slot=x) for x in "qkv"),
        *(Row(f"{attention}{x}_proj.bias", ours + "attention.qkv.bias", bias, x, "qkv_bias") for x in "qkv"),
        Row(attention + "q_norm.weight", ours + "attention.q_norm.scale", "d -> d", when="qk_norm"),
        Row(attention + "k_norm.weight", ours + "attention.k_norm.scale", "d -> d", when="qk_norm"),
        Row(attention + "o_proj.weight", ours + "attention.o.kernel", "h (kv g d) -> h kv g d"),
        Row(attention + "o_proj.bias", ours + "attention.o.bias", "h -> h", when="o_bias"),
        Row(hf + "post_attention_layernorm.weight", ours + "post_attention_norm.scale", "h -> h"),
        *(Row(f"{mlp}{x}_proj.weight", ours + "mlp.gate_up.kernel", gate_up, slot=x) for x in ("gate", "up")),
        *(
            Row(f"{mlp}{x}_proj.bias", ours + "mlp.gate_up.bias", "(slot f) -> f slot", x, "mlp_bias")
            for x in ("gate", "up")
        ),
        Row(mlp + "down_proj.weight", ours + "mlp.down.kernel", "h f -> h f"),
        Row(mlp + "down_proj.bias", ours + "mlp.down.bias", "h -> h", when="mlp_bias"),
    )


DECODER_ROWS = (
    Row("model.embed_tokens.weight", "embed.embedding", "v h -> v h"),
    Row("model.layers.{i}.input_layernorm.weight", "layers.{i}.input_norm.scale", "h -> h"),
    *_layer("model.layers.{i}.", "layers.{i}."),
    Row("model.norm.weight", "final_norm.scale", "h -> h"),
    Row("lm_head.weight", "lm_head.kernel", "v h -> v h", unless="tie_word_embeddings"),
)
# The words are not split over devices, as whoever drafts looks for the likeliest of all of them in every step.
HEAD_ROWS = (
    Row("embed_tokens.weight", "embed.embedding", "v h -> v h", when="has_embeddings"),
    Row("fc.weight", "fc.kernel", "h n -> h n", when="has_fc"),
    Row("midlayer.input_layernorm.weight", "input_norm.scale", "h -> h"),
    Row("midlayer.hidden_norm.weight", "feature_norm.scale", "h -> h"),
    *_layer("midlayer.", "", inputs="p"),
    Row("norm.weight", "final_norm.scale", "h -> h"),
    Row("lm_head.weight", "lm_head.kernel", "w h -> w h"),
    Row("d2t", "target_ids", "w -> w", when="has_token_ids", offsets=True),
)
# Other beginnings that publishers give to a head's names, and what stands for them here, one after the other.
HEAD_ALIASES = (("model.", ""), ("layers.0.", "midlayer."))

# Tensors that may stand in a checkpoint without being weights of the model: buffers that are computed here, and of
# heads, which of the target's tokens have a word.
IGNORED = ("*.rotary_emb.inv_freq",)
HEAD_IGNORED = (*IGNORED, "*.t2d")
# With tied embeddings some writers store the table twice; the copy must equal the original.
TIED_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class Layout:
    """Rows, and all that they need to know of one configuration.

    Attributes:
        name: of the architecture, for messages.
        sizes: of the axes, by their letters.
        fields: those of the configuration that are true.
        num_layers: how often a row with {i} stands for a tensor.
        dtype: that the configuration names, if it does.
        aliases: see `HEAD_ALIASES`.
        ignored: patterns of names that carry no weights.
        tied_copies: name of a tensor that repeats another one -> that one's.
    """

    name: str
    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    fields: frozenset[str]
    num_layers: int
    dtype: str | None
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = IGNORED
    tied_copies: Mapping[str, str] | None = None


_FIELDS = ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")


def layout_of(config: ModelConfig | Layout) -> Layout:
    """The layout of a decoder; one that is given comes back."""
    if isinstance(config, Layout):
        return config
    return Layout(
        name=config.architecture,
        rows=DECODER_ROWS,
        sizes=_sizes(config),
        fields=_fields(config),
        num_layers=config.num_layers,
        dtype=config.dtype,
        tied_copies=TIED_COPIES if config.tie_word_embeddings else None,
    )


def head_layout(config: Eagle3Config, has_token_ids: bool = True) -> Layout:
    """The layout of an EAGLE-3 head; without token ids of its own, its words are the target's in their order."""
    layer = config.layer
    own = {
        "has_embeddings": config.has_embeddings,
        "has_fc": config.num_features != layer.hidden_size,
        "has_token_ids": has_token_ids,
    }
    return Layout(
        name="an EAGLE-3 head",
        rows=HEAD_ROWS,
        sizes=_sizes(layer) | {"p": 2 * layer.hidden_size, "n": config.num_features, "w": config.draft_vocab_size},
        fields=_fields(layer) | {name for name, value in own.items() if value},
        num_layers=1,
        dtype=layer.dtype,
        aliases=HEAD_ALIASES,
        ignored=HEAD_IGNORED,
    )


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "v": config.vocab_size, "h": config.hidden_size, "f": config.intermediate_size,
        "kv": config.num_kv_heads, "g": config.group_size, "d": config.head_dim,
    }  # fmt: skip


def _fields(config: ModelConfig) -> frozenset[str]:
    return frozenset(name for name in _FIELDS if getattr(config, name))

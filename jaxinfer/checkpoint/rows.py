"""Rows of the weight map as data, for decoders and EAGLE-3 heads, and the layouts that they are applied to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.models.families import FAMILIES


@dataclass(frozen=True)
class Row:
    """One source tensor, or one for each layer or expert: its name, its parameter, and how its axes are regrouped.

    `axes` reads "source axes -> parameter axes"; axes in parentheses are fused in the source. Sizes of the axes: v
    vocabulary, h hidden, f intermediate, kv key/value heads, g query heads per key/value head, d head dimension, e
    experts, x intermediate of an expert, s of shared experts; for EAGLE-3 heads also p pair of embedding and feature, n
    features, w draft vocabulary. On the axis `slot`, several sources share one parameter; `slot` names this source's
    share of it. A source with {j} in its name is one expert's, and its axis e has size 1.
    """

    source: str
    target: str
    axes: str
    slot: str | None = None
    when: str | None = None  # only if this field of the configuration is true
    unless: str | None = None  # only if this field of the configuration is false
    layers: str | None = None  # only of "dense" layers, or of "sparse" ones
    offsets: bool = False  # token ids, int32; in the source, element i is the id minus i
    is_one_of_three: bool = False  # q, k or v of a source that concatenates them
    is_rotated: bool = False  # rotary embeddings apply to the axis d
    is_normed: bool = False  # divided by its columns' norms if the configuration says so
    dtype: str | None = None  # its own dtype; None: that of the weights


@dataclass(frozen=True)
class Names:
    """Publishers' names of a model's tensors; names of a layer's tensors follow the prefix `layer`."""

    embeddings: str = "model.embed_tokens"
    layer: str = "model.layers.{i}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn."
    qkv: str | None = None  # q, k and v in one tensor
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    post_attention_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts."


NAMES = {
    "llama": Names(),
    "bailing": Names(
        embeddings="model.word_embeddings", attention="attention.", qkv="query_key_value", o="dense",
        q_norm="query_layernorm", k_norm="key_layernorm",
    ),
    "llada": Names(
        embeddings="model.transformer.wte", layer="model.transformer.blocks.{i}.", final_norm="model.transformer.ln_f",
        head="model.transformer.ff_out", input_norm="attn_norm", attention="", o="attn_out",
        post_attention_norm="ff_norm", mlp="", gate="ff_proj", up="up_proj", down="ff_out",
    ),
    "llada_moe": Names(shared="shared_expert."),
}  # fmt: skip


def _layer(hf: str, ours: str, inputs: str = "h", names: Names = NAMES["llama"]) -> tuple[Row, ...]:
    """Rows of one layer's attention, post-attention norm and MLP; attention reads the axis `inputs`."""
    kernel, bias = f"(kv slot d) {inputs} -> kv slot d {inputs}", "(kv slot d) -> kv slot d"
    attention, mlp = hf + names.attention, ours + "mlp."
    qkv = []
    for x in "qkv":
        source = attention + (names.qkv or f"{x}_proj")
        row = partial(Row, slot=x, is_one_of_three=names.qkv is not None, is_rotated=x != "v")
        qkv.append(row(source + ".weight", ours + "attention.qkv.kernel", kernel))
        qkv.append(row(source + ".bias", ours + "attention.qkv.bias", bias, when="qkv_bias"))
    norms = [
        Row(f"{attention}{name}.weight", f"{ours}attention.{x}_norm.scale", "d -> d", when="qk_norm", is_rotated=True)
        for x, name in (("q", names.q_norm), ("k", names.k_norm))
    ]
    return (
        *sorted(qkv, key=lambda row: row.target, reverse=True),
        *norms,
        Row(f"{attention}{names.o}.weight", ours + "attention.o.kernel", "h (kv g d) -> h kv g d"),
        Row(f"{attention}{names.o}.bias", ours + "attention.o.bias", "h -> h", when="o_bias"),
        Row(f"{hf}{names.post_attention_norm}.weight", ours + "post_attention_norm.scale", "h -> h"),
        *_mlp(hf + names.mlp, mlp, "f", names, layers="dense"),
        Row(hf + "mlp.gate.weight", mlp + "router.kernel", "e h -> e h", layers="sparse"),
        Row(
            hf + "mlp.gate.expert_bias", mlp + "router.bias", "e -> e", when="has_bias", layers="sparse",
            dtype="float32",
        ),
        *_mlp(hf + names.shared, mlp + "shared.", "s", names, when="has_shared", layers="sparse"),
    )  # fmt: skip


def _mlp(hf: str, ours: str, inner: str, names: Names, **options: Any) -> tuple[Row, ...]:
    """Rows of a gated MLP with the intermediate axis `inner`."""
    halves = (("gate", names.gate), ("up", names.up))
    kernel, bias = f"(slot {inner}) h -> {inner} slot h", f"(slot {inner}) -> {inner} slot"
    biased: dict[str, Any] = {**options, "when": "mlp_bias"}
    return (
        *(Row(f"{hf}{name}.weight", ours + "gate_up.kernel", kernel, x, **options) for x, name in halves),
        *(Row(f"{hf}{name}.bias", ours + "gate_up.bias", bias, x, **biased) for x, name in halves),
        Row(f"{hf}{names.down}.weight", ours + "down.kernel", f"h {inner} -> h {inner}", **options),
        Row(f"{hf}{names.down}.bias", ours + "down.bias", "h -> h", **biased),
    )


_EXPERTS, _GATE_UP, _DOWN = "model.layers.{i}.mlp.", "layers.{i}.mlp.gate_up.kernel", "layers.{i}.mlp.down.kernel"
# Formats in which experts are stored, the usual one first: a tensor per expert; all experts in one tensor for each of
# gate, up and down; gate and up fused as well, under either of two names.
_SPARSE: dict[str, Any] = {"layers": "sparse"}
EXPERT_ROWS = (
    (
        *(
            Row(_EXPERTS + "experts.{j}." + x + "_proj.weight", _GATE_UP, "(e slot x) h -> e x slot h", x, **_SPARSE)
            for x in ("gate", "up")
        ),
        Row(_EXPERTS + "experts.{j}.down_proj.weight", _DOWN, "(e h) x -> e h x", **_SPARSE),
    ),
    (
        *(
            Row(f"{_EXPERTS}experts.{x}_proj", _GATE_UP, "e (slot x) h -> e x slot h", x, **_SPARSE)
            for x in ("gate", "up")
        ),
        Row(_EXPERTS + "experts.down_proj", _DOWN, "e h x -> e h x", **_SPARSE),
    ),
    (
        Row(_EXPERTS + "experts.gate_up_proj", _GATE_UP, "e (slot x) h -> e x slot h", **_SPARSE),
        Row(_EXPERTS + "experts.down_proj", _DOWN, "e h x -> e h x", **_SPARSE),
    ),
    (
        Row(_EXPERTS + "w1", _GATE_UP, "e (slot x) h -> e x slot h", **_SPARSE),
        Row(_EXPERTS + "w2", _DOWN, "e h x -> e h x", **_SPARSE),
    ),
)


def _decoder(names: Names) -> tuple[Row, ...]:
    return (
        Row(f"{names.embeddings}.weight", "embed.embedding", "v h -> v h"),
        Row(f"{names.layer}{names.input_norm}.weight", "layers.{i}.input_norm.scale", "h -> h"),
        *_layer(names.layer, "layers.{i}.", names=names),
        Row(f"{names.final_norm}.weight", "final_norm.scale", "h -> h"),
        Row(f"{names.head}.weight", "lm_head.kernel", "v h -> v h", unless="tie_word_embeddings", is_normed=True),
    )


DECODER_ROWS = {name: _decoder(names) for name, names in NAMES.items()}
# The draft vocabulary (axis w) is not sharded, because every draft step takes the argmax over all of it.
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
# Other prefixes in publishers' names of a head's tensors -> the prefix here; applied in order.
HEAD_ALIASES = (("model.", ""), ("layers.0.", "midlayer."))

# Tensors of a checkpoint that are not weights: buffers that are computed here, and a head's mask of the target tokens
# that are in its draft vocabulary.
IGNORED = ("*.rotary_emb.inv_freq",)
HEAD_IGNORED = (*IGNORED, "*.t2d")


@dataclass(frozen=True)
class Layout:
    """Rows, and the values of one configuration that they depend on.

    Attributes:
        name: name of the architecture, for messages.
        sizes: sizes of the axes, by their letters.
        fields: names of the configuration's fields that are true.
        num_layers: number of layers that {i} counts.
        dense_layers: numbers of the layers that have no experts.
        rotary_dim: number of rotated dimensions of a head.
        alternatives: other rows for the same parameters; a checkpoint may hold the tensors of one of them instead.
        dtype: dtype that the configuration names, if any.
        aliases: see `HEAD_ALIASES`.
        ignored: patterns of names of tensors that are not weights.
        left_out: patterns of names of weights that are not used.
        tied_copies: name of a tensor that repeats another one -> name of the other.
    """

    name: str
    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    fields: frozenset[str]
    num_layers: int
    dtype: str | None
    rotary_dim: int
    dense_layers: frozenset[int] = frozenset()
    alternatives: tuple[tuple[Row, ...], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = IGNORED
    left_out: tuple[str, ...] = ()
    tied_copies: Mapping[str, str] | None = None

    def stored_as(self, names: Collection[str]) -> Layout:
        """Return the layout with the alternative rows whose tensors a checkpoint has."""
        sparse = (number for number in range(self.num_layers) if number not in self.dense_layers)
        first = next(sparse, None)
        for rows in self.alternatives:
            if first is not None and all(row.source.format(i=first) in names for row in rows):
                usual = set(EXPERT_ROWS[0])
                return replace(self, rows=(*(row for row in self.rows if row not in usual), *rows))
        return self


_FIELDS = ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "normalizes_head")


def layout_of(config: ModelConfig | Layout) -> Layout:
    """Return the layout of a decoder's configuration; a layout is returned as it is."""
    if isinstance(config, Layout):
        return config
    publisher, layers = FAMILIES[config.architecture].names, range(config.num_layers)
    rows, names = DECODER_ROWS[publisher], NAMES[publisher]
    # With tied embeddings some writers store the table twice; the copy must equal the original.
    copies = {f"{names.head}.weight": f"{names.embeddings}.weight"}
    extra = range(config.num_layers, config.num_layers + config.num_nextn_layers)
    return Layout(
        name=config.architecture,
        rows=(*rows, *EXPERT_ROWS[0]),
        sizes=_sizes(config),
        fields=_fields(config),
        num_layers=config.num_layers,
        dense_layers=frozenset(number for number in layers if not config.is_sparse(number)),
        dtype=config.dtype,
        rotary_dim=config.rotary_dim,
        alternatives=EXPERT_ROWS[1:],
        left_out=tuple(f"*layers.{number}.*" for number in extra),
        tied_copies=copies if config.tie_word_embeddings else None,
    )


def head_layout(config: Eagle3Config, has_token_ids: bool = True) -> Layout:
    """Return the layout of an EAGLE-3 head; without token ids, draft token i is the target's token i."""
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
        dense_layers=frozenset({0}),
        dtype=layer.dtype,
        rotary_dim=layer.rotary_dim,
        aliases=HEAD_ALIASES,
        ignored=HEAD_IGNORED,
    )


def _sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {
        "v": config.vocab_size, "h": config.hidden_size, "f": config.intermediate_size,
        "kv": config.num_kv_heads, "g": config.group_size, "d": config.head_dim,
    }  # fmt: skip
    experts = config.experts
    if experts is None:
        return sizes
    return sizes | {"e": experts.num_experts, "x": experts.intermediate_size, "s": experts.shared_size}


def _fields(config: ModelConfig) -> frozenset[str]:
    experts = config.experts
    own = {"has_bias": experts and experts.has_bias, "has_shared": experts and experts.shared_size}
    return frozenset(name for name in _FIELDS if getattr(config, name)) | {name for name, value in own.items() if value}

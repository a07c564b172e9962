"""Rows of the weight map as data, for decoders and EAGLE-3 heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxinfer.checkpoint.names import NAMES, Names


@dataclass(frozen=True)
class Row:
    """One source tensor, or one for each layer or expert: its name, its parameter, and how its axes are regrouped.

    `axes` reads "source axes -> parameter axes"; axes in parentheses are fused in the source. Sizes of the axes: v
    vocabulary, h hidden, f intermediate, kv key/value heads, g query heads per key/value head, d head dimension, e
    experts, x intermediate of an expert, s of shared experts, `one` 1, `layers` and `width` of inputs by layer; for
    EAGLE-3 heads also p pair of embedding and feature, n features, w draft vocabulary. On the axis `slot`, several
    sources share one parameter; `slot` names this source's share of it. A source with {j} in its name is one expert's,
    and its axis e has size 1.
    """

    source: str
    target: str
    axes: str
    slot: str | None = None
    when: str | None = None  # only if this field of the configuration is true
    unless: tuple[str, ...] = ()  # only if these fields of the configuration are false
    layers: str | None = None  # only of "dense" layers, or of "sparse" ones
    offsets: bool = False  # token ids, int32; in the source, element i is the id minus i
    is_one_of_three: bool = False  # q, k or v of a source that concatenates them
    is_rotated: bool = False  # rotary embeddings apply to the axis d
    is_normed: bool = False  # divided by its columns' norms if the configuration says so
    # Scale of a norm: of a layer, of q or k, or the final one. The configuration says whether it is float32, and
    # whether the source is the scale minus 1.
    norm: Literal["", "layer", "head", "final"] = ""
    dtype: str | None = None  # its own dtype; None: that of the weights


def _layer(hf: str, ours: str, inputs: str = "h", names: Names = NAMES["llama"]) -> tuple[Row, ...]:
    """Rows of one layer's attention, norms and MLP; attention reads the axis `inputs`."""
    return (
        *_attention(hf + names.attention, ours + "attention.", inputs, names),
        Row(f"{hf}{names.attention_result_norm}.weight", ours + "attention_result_norm.scale", "h -> h",
            when="norms_after", norm="layer"),
        Row(f"{hf}{names.post_attention_norm}.weight", ours + "post_attention_norm.scale", "h -> h",
            when="norms_before", norm="layer"),
        *_mlp(hf + names.mlp, ours + "mlp.", "f", names, layers=None if names.is_beside_mlp else "dense"),
        Row(f"{hf}{names.mlp_result_norm}.weight", ours + "mlp_result_norm.scale", "h -> h",
            when="norms_after", norm="layer"),
        Row(hf + names.scalar, ours + "scalar.scale", "one -> one", when="has_layer_scalar"),
        Row(hf + "per_layer_input_gate.weight", ours + "per_layer.gate.kernel", "width h -> width h",
            when="has_per_layer"),
        Row(hf + "per_layer_projection.weight", ours + "per_layer.projection.kernel", "h width -> h width",
            when="has_per_layer"),
        Row(hf + "post_per_layer_input_norm.weight", ours + "per_layer.norm.scale", "h -> h", when="has_per_layer",
            norm="layer"),
        *_router(hf, ours, names),
        *_mlp(hf + names.shared, ours + "mlp.shared.", "s", names, when="has_shared", layers="sparse"),
        Row(hf + names.shared_gate, ours + "mlp.shared_gate.kernel", "one h -> one h", when="shared_is_gated",
            layers="sparse"),
    )  # fmt: skip


# Fields that are true of layers without keys, or without values, of their own.
_ABSENT: dict[str, tuple[str, ...]] = {"q": (), "k": ("has_no_kv",), "v": ("has_no_kv", "values_are_keys")}


def _attention(hf: str, ours: str, inputs: str, names: Names) -> tuple[Row, ...]:
    kernel, bias = f"(kv slot d) {inputs} -> kv slot d {inputs}", "(kv slot d) -> kv slot d"
    qkv = []
    for x in "qkv":
        source, absent = hf + (names.qkv or f"{x}_proj"), _ABSENT[x]
        row = partial(Row, slot=x, is_one_of_three=names.qkv is not None, is_rotated=x != "v", unless=absent)
        qkv.append(row(source + ".weight", ours + "qkv.kernel", kernel))
        qkv.append(row(source + ".bias", ours + "qkv.bias", bias, when="qkv_bias"))
    norms = [
        Row(
            f"{hf}{name}.weight",
            f"{ours}{x}_norm.scale",
            axes,
            when=when,
            unless=_ABSENT[x],
            is_rotated=True,
            norm="head",
        )
        for x, name, over_all in (("q", names.q_norm, "(kv g d) -> kv g d"), ("k", names.k_norm, "(kv d) -> kv d"))
        for when, axes in (("norms_heads", "d -> d"), ("norms_over_heads", over_all))
    ]
    gate = f"{hf}{names.attention_gate}.weight", ours + "gate.kernel"
    return (
        *sorted(qkv, key=lambda row: row.target, reverse=True),
        *norms,
        Row(hf + names.sinks, ours + "sinks", "(kv g) -> kv g", when="has_sinks"),
        Row(*gate, f"(kv g d) {inputs} -> kv g d {inputs}", when="gates_elements"),
        Row(*gate, f"(kv g) {inputs} -> kv g {inputs}", when="gates_heads"),
        Row(f"{hf}{names.o}.weight", ours + "o.kernel", "h (kv g d) -> h kv g d"),
        Row(f"{hf}{names.o}.bias", ours + "o.bias", "h -> h", when="o_bias"),
    )


def _mlp(hf: str, ours: str, inner: str, names: Names, **options: Any) -> tuple[Row, ...]:
    """Rows of a gated MLP with the intermediate axis `inner`."""
    halves = (("gate", names.gate), ("up", names.up))
    kernel, bias = f"(slot {inner}) h -> {inner} slot h", f"(slot {inner}) -> {inner} slot"
    biased: dict[str, Any] = {**options, "when": "mlp_bias"}
    gate_up = (
        [Row(f"{hf}{name}.weight", ours + "gate_up.kernel", kernel, x, **options) for x, name in halves]
        if names.gate_up is None
        else [Row(f"{hf}{names.gate_up}.weight", ours + "gate_up.kernel", kernel, **options)]
    )
    return (
        *gate_up,
        *(Row(f"{hf}{name}.bias", ours + "gate_up.bias", bias, x, **biased) for x, name in halves),
        Row(f"{hf}{names.down}.weight", ours + "down.kernel", f"h {inner} -> h {inner}", **options),
        Row(f"{hf}{names.down}.bias", ours + "down.bias", "h -> h", **biased),
    )


_SPARSE: dict[str, Any] = {"layers": "sparse"}


def _router(hf: str, ours: str, names: Names) -> tuple[Row, ...]:
    """Rows of a router, and of what surrounds experts beside an MLP."""
    mixture = ours + _mixture_of(names)
    rows = (
        Row(hf + names.router, mixture + "router.kernel", "e h -> e h", **_SPARSE),
        Row(hf + names.choice_bias, mixture + "router.bias", "e -> e", when="has_bias", dtype="float32", **_SPARSE),
        Row(hf + names.logit_bias, mixture + "router.logit_bias", "e -> e", when="has_logit_bias", **_SPARSE),
    )
    if not names.is_beside_mlp:
        return rows
    norm: dict[str, Any] = {"axes": "h -> h", "norm": "layer", **_SPARSE}
    return (
        *rows,
        Row(hf + "router.scale", mixture + "scales.inputs", "h -> h", **_SPARSE),
        Row(hf + "router.per_expert_scale", mixture + "scales.experts", "e -> e", **_SPARSE),
        Row(hf + "pre_feedforward_layernorm_2.weight", mixture + "input_norm.scale", **norm),
        Row(hf + "post_feedforward_layernorm_1.weight", mixture + "mlp_result_norm.scale", **norm),
        Row(hf + "post_feedforward_layernorm_2.weight", mixture + "result_norm.scale", **norm),
    )


def _mixture_of(names: Names) -> str:
    return "beside." if names.is_beside_mlp else "mlp."


def expert_rows(names: Names) -> tuple[tuple[Row, ...], ...]:
    """Return the formats in which a family's experts are stored, the usual one first.

    A tensor per expert; all experts in one tensor for each of gate, up and down; gate and up fused as well, under
    either of two names. Experts beside an MLP are usually fused. With inputs first: as they are, or in blocks of MXFP4,
    which have outputs first.
    """
    hf, ours = names.layer + names.experts, "layers.{i}." + _mixture_of(names)
    gate_up, down = ours + "gate_up.kernel", ours + "down.kernel"
    outputs_first = "e (slot x) h -> e x slot h", "e h x -> e h x"
    if names.inputs_first:
        biases = (
            Row(hf + "gate_up_proj_bias", ours + "gate_up.bias", "e (x slot) -> e x slot", **_SPARSE),
            Row(hf + "down_proj_bias", ours + "down.bias", "e h -> e h", **_SPARSE),
        )
        return (
            (
                Row(hf + "gate_up_proj", gate_up, "e h (x slot) -> e x slot h", **_SPARSE),
                Row(hf + "down_proj", down, "e x h -> e h x", **_SPARSE),
                *biases,
            ),
            (
                Row(hf + "gate_up_proj_blocks", gate_up, "e (x slot) h -> e x slot h", **_SPARSE),
                Row(hf + "down_proj_blocks", down, "e h x -> e h x", **_SPARSE),
                *biases,
            ),
        )
    halves = (("gate", names.expert_gate), ("up", names.expert_up))
    short = hf.removesuffix("experts.")
    apart, together, fused, shortened = (
        (
            *(
                Row(f"{hf}{{j}}.{name}.weight", gate_up, "(e slot x) h -> e x slot h", x, **_SPARSE)
                for x, name in halves
            ),
            Row(f"{hf}{{j}}.{names.expert_down}.weight", down, "(e h) x -> e h x", **_SPARSE),
        ),
        (
            *(Row(f"{hf}{x}_proj", gate_up, outputs_first[0], x, **_SPARSE) for x in ("gate", "up")),
            Row(hf + "down_proj", down, outputs_first[1], **_SPARSE),
        ),
        (
            Row(hf + "gate_up_proj", gate_up, outputs_first[0], **_SPARSE),
            Row(hf + "down_proj", down, outputs_first[1], **_SPARSE),
        ),
        (
            Row(short + "w1", gate_up, outputs_first[0], **_SPARSE),
            Row(short + "w2", down, outputs_first[1], **_SPARSE),
        ),
    )
    return (fused, apart, together, shortened) if names.is_beside_mlp else (apart, together, fused, shortened)


def _decoder(names: Names) -> tuple[Row, ...]:
    return (
        Row(f"{names.embeddings}.weight", "embed.embedding", "v h -> v h"),
        Row("model.embed_tokens_per_layer.weight", "per_layer.table", "v (layers width) -> v layers width",
            when="has_per_layer"),
        Row("model.per_layer_model_projection.weight", "per_layer.projection.kernel",
            "(layers width) h -> layers width h", when="has_per_layer"),
        Row("model.per_layer_projection_norm.weight", "per_layer.norm.scale", "width -> width", when="has_per_layer",
            norm="layer"),
        Row(f"{names.layer}{names.input_norm}.weight", "layers.{i}.input_norm.scale", "h -> h", when="norms_before",
            norm="layer"),
        *_layer(names.layer, "layers.{i}.", names=names),
        Row(f"{names.final_norm}.weight", "final_norm.scale", "h -> h", norm="final"),
        Row(f"{names.head}.weight", "lm_head.kernel", "v h -> v h", unless=("tie_word_embeddings",), is_normed=True),
    )  # fmt: skip


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

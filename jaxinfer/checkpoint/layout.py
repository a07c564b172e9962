"""Layouts: the rows that a configuration's checkpoints have, and the values that they depend on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from jaxinfer.checkpoint.names import NAMES
from jaxinfer.checkpoint.rows import DECODER_ROWS, HEAD_ALIASES, HEAD_ROWS, Row, expert_rows
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.wrappers import WRAPPERS

# In a checkpoint of the bare decoder (without output head), names lack this prefix.
BASE_PREFIX = "model."

# Tensors of a checkpoint that are not weights: buffers that are computed here, and a head's mask of the target tokens
# that are in its draft vocabulary.
IGNORED = ("*.rotary_emb.inv_freq",)
HEAD_IGNORED = (*IGNORED, "*.t2d")


@dataclass(frozen=True)
class OfLayer:
    """What a layer has of its own: sizes of its axes, rotated dimensions of a head, and fields that are true of it."""

    sizes: Mapping[str, int]
    rotary_dim: int
    fields: frozenset[str]


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
        alternatives: rows for the same parameters, the usual ones first; a checkpoint may hold the tensors of any.
        dtype: dtype that the configuration names, if any.
        by_layer: what each layer has of its own; empty: all are alike.
        pairs_neighbours: in the sources, rotated dimensions are paired with their neighbours.
        aliases: other beginnings of names in checkpoints -> the beginnings here; applied in order.
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
    by_layer: tuple[OfLayer, ...] = ()
    pairs_neighbours: bool = False
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = IGNORED
    left_out: tuple[str, ...] = ()
    tied_copies: Mapping[str, str] | None = None

    def of_layer(self, number: int) -> OfLayer:
        """Return sizes and fields of a layer, the common ones included."""
        if not self.by_layer:
            return OfLayer(self.sizes, self.rotary_dim, self.fields)
        own = self.by_layer[number]
        return OfLayer({**self.sizes, **own.sizes}, own.rotary_dim, self.fields | own.fields)

    def mapped(self, name: str) -> str:
        """Return a tensor's name in the map; publishers may use another prefix."""
        for alias, beginning in self.aliases:
            if name.startswith(alias):
                name = beginning + name.removeprefix(alias)
        return name

    def stored_as(self, names: Collection[str]) -> Layout:
        """Return the layout with the alternative rows whose tensors a checkpoint has."""
        sparse = (number for number in range(self.num_layers) if number not in self.dense_layers)
        first = next(sparse, None)
        if first is None:
            return self
        known = {self.mapped(name) for name in names}
        for rows in self.alternatives:
            sources = [row.source.format(i=first, j=0) for row in rows if not row.when or row.when in self.fields]
            if all(source in known or source.removeprefix(BASE_PREFIX) in known for source in sources):
                return self._with(rows)
        return self

    def variants(self) -> tuple[Layout, ...]:
        """Return the layout with each of its alternative rows."""
        return tuple(map(self._with, self.alternatives)) or (self,)

    def _with(self, rows: tuple[Row, ...]) -> Layout:
        usual = set(self.alternatives[0])
        return replace(self, rows=(*(row for row in self.rows if row not in usual), *rows))


_FIELDS = (
    "tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "normalizes_head", "float32_norms", "has_sinks",
    "has_layer_scalar",
)  # fmt: skip


def layout_of(config: ModelConfig | Layout) -> Layout:
    """Return the layout of a decoder's configuration; a layout is returned as it is."""
    if isinstance(config, Layout):
        return config
    publisher, layers = FAMILIES[config.architecture].names, range(config.num_layers)
    rows, names = DECODER_ROWS[publisher], NAMES[publisher]
    formats = expert_rows(names)
    wrappers = [wrapper for wrapper in WRAPPERS.values() if config.architecture in wrapper.texts.values()][:1]
    # With tied embeddings some writers store the table twice; the copy must equal the original.
    copies = {f"{names.head}.weight": f"{names.embeddings}.weight"}
    extra = range(config.num_layers, config.num_layers + config.num_nextn_layers)
    return Layout(
        name=config.architecture,
        rows=(*rows, *formats[0]),
        sizes=_sizes(config),
        fields=_fields(config),
        num_layers=config.num_layers,
        dense_layers=frozenset(number for number in layers if not config.is_sparse(number)),
        dtype=config.dtype,
        rotary_dim=config.rotary_dim,
        alternatives=formats,
        by_layer=_by_layer(config),
        pairs_neighbours=config.pairs_neighbours,
        aliases=tuple(pair for wrapper in wrappers for pair in wrapper.prefixes),
        left_out=(
            *(f"*layers.{number}.*" for number in extra),
            *(
                f"*layers.{number}.{names.attention}{name}.*"
                for number, layer in enumerate(config.layers)
                if layer.kv_from is not None
                for name in ("k_proj", "v_proj", names.k_norm)
            ),
            *(pattern for wrapper in wrappers for pattern in wrapper.left_out),
        ),
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


def _by_layer(config: ModelConfig) -> tuple[OfLayer, ...]:
    """Return what layers have of their own, if they differ."""
    return tuple(
        OfLayer(
            {
                "kv": layer.num_kv_heads,
                "g": layer.group_size,
                "d": layer.head_dim,
                "f": layer.mlp_size or config.intermediate_size,
            },
            layer.rotary_dim,
            frozenset(
                name
                for name, is_true in (
                    ("values_are_keys", layer.values_are_keys),
                    ("has_no_kv", layer.kv_from is not None),
                )
                if is_true
            ),
        )
        for layer in config.layers
    )


def _sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {
        "v": config.vocab_size, "h": config.hidden_size, "f": config.intermediate_size,
        "kv": config.num_kv_heads, "g": config.group_size, "d": config.head_dim, "one": 1,
        "layers": config.num_layers, "width": config.per_layer_size,
    }  # fmt: skip
    experts = config.experts
    if experts is None:
        return sizes
    return sizes | {"e": experts.num_experts, "x": experts.intermediate_size, "s": experts.shared_size}


def _fields(config: ModelConfig) -> frozenset[str]:
    experts, has_scales = config.experts, config.qk_norm and config.qk_norm_has_weights
    own = {
        "norms_before": config.norms != "after",
        "norms_after": config.norms != "before",
        "norms_heads": has_scales and config.qk_norm_of != "all_heads",
        "norms_over_heads": has_scales and config.qk_norm_of == "all_heads",
        "norm_offset": config.norm_offset != "none",
        "final_norm_offset": config.norm_offset == "all",
        "has_per_layer": config.per_layer_size > 0,
        "gates_elements": config.gate != "none" and config.gate_of == "element",
        "gates_heads": config.gate != "none" and config.gate_of == "head",
    }
    if experts is not None:
        own |= {
            "has_bias": experts.has_bias,
            "has_logit_bias": experts.has_logit_bias,
            "has_shared": experts.shared_size > 0,
            "shared_is_gated": experts.shared_is_gated,
        }
    return frozenset(name for name in _FIELDS if getattr(config, name)) | {name for name, value in own.items() if value}

"""The weight map: which Hugging Face tensor fills which slot of which parameter, as data."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.checkpoint.errors import CheckpointError, some_of
from jaxinfer.models.config import ModelConfig


@dataclass(frozen=True)
class Row:
    """One source tensor: its name, its parameter, and how its axes are regrouped.

    `axes` reads "source axes -> parameter axes"; axes in parentheses are fused in the source. Sizes of the axes: v
    vocabulary, h hidden, f intermediate, kv key/value heads, g query heads per key/value head, d head dimension. The
    axis `slot` is where several sources share one parameter; `slot` names this source's share of it.
    """

    source: str
    target: str
    axes: str
    slot: str | None = None
    when: str | None = None  # only if this field of ModelConfig is true
    unless: str | None = None  # only if this field of ModelConfig is false


_HF = "model.layers.{i}."
_OURS = "layers.{i}."

ROWS = (
    Row("model.embed_tokens.weight", "embed.embedding", "v h -> v h"),
    Row(_HF + "input_layernorm.weight", _OURS + "input_norm.scale", "h -> h"),
    Row(_HF + "self_attn.q_proj.weight", _OURS + "attention.qkv.kernel", "(kv slot d) h -> kv slot d h", slot="q"),
    Row(_HF + "self_attn.k_proj.weight", _OURS + "attention.qkv.kernel", "(kv slot d) h -> kv slot d h", slot="k"),
    Row(_HF + "self_attn.v_proj.weight", _OURS + "attention.qkv.kernel", "(kv slot d) h -> kv slot d h", slot="v"),
    Row(_HF + "self_attn.q_proj.bias", _OURS + "attention.qkv.bias", "(kv slot d) -> kv slot d", "q", "qkv_bias"),
    Row(_HF + "self_attn.k_proj.bias", _OURS + "attention.qkv.bias", "(kv slot d) -> kv slot d", "k", "qkv_bias"),
    Row(_HF + "self_attn.v_proj.bias", _OURS + "attention.qkv.bias", "(kv slot d) -> kv slot d", "v", "qkv_bias"),
    Row(_HF + "self_attn.q_norm.weight", _OURS + "attention.q_norm.scale", "d -> d", when="qk_norm"),
    Row(_HF + "self_attn.k_norm.weight", _OURS + "attention.k_norm.scale", "d -> d", when="qk_norm"),
    Row(_HF + "self_attn.o_proj.weight", _OURS + "attention.o.kernel", "h (kv g d) -> h kv g d"),
    Row(_HF + "self_attn.o_proj.bias", _OURS + "attention.o.bias", "h -> h", when="o_bias"),
    Row(_HF + "post_attention_layernorm.weight", _OURS + "post_attention_norm.scale", "h -> h"),
    Row(_HF + "mlp.gate_proj.weight", _OURS + "mlp.gate_up.kernel", "(slot f) h -> f slot h", slot="gate"),
    Row(_HF + "mlp.up_proj.weight", _OURS + "mlp.gate_up.kernel", "(slot f) h -> f slot h", slot="up"),
    Row(_HF + "mlp.gate_proj.bias", _OURS + "mlp.gate_up.bias", "(slot f) -> f slot", "gate", "mlp_bias"),
    Row(_HF + "mlp.up_proj.bias", _OURS + "mlp.gate_up.bias", "(slot f) -> f slot", "up", "mlp_bias"),
    Row(_HF + "mlp.down_proj.weight", _OURS + "mlp.down.kernel", "h f -> h f"),
    Row(_HF + "mlp.down_proj.bias", _OURS + "mlp.down.bias", "h -> h", when="mlp_bias"),
    Row("model.norm.weight", "final_norm.scale", "h -> h"),
    Row("lm_head.weight", "lm_head.kernel", "v h -> v h", unless="tie_word_embeddings"),
)

# A parameter is split over the mesh axis "tensor" along the first of these axes that it has.
SHARDED_AXES = ("kv", "f", "v")
MESH_AXIS = "tensor"

# Tensors that may stand in a checkpoint without being weights of the model: buffers that are computed here.
IGNORED = ("*.rotary_emb.inv_freq",)
# With tied embeddings some writers store the table twice; the copy must equal the original.
TIED_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
# A checkpoint of the bare decoder (without head) has its names without this prefix.
BASE_PREFIX = "model."


@dataclass(frozen=True)
class Parameter:
    """One parameter of a configuration: its path in the module tree, its shape, its axes, its split over a mesh."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: PartitionSpec


@dataclass(frozen=True)
class Placement:
    """A row of the map applied to one configuration and one layer: everything with its size.

    Attributes:
        source, source_shape: the Hugging Face tensor.
        target: the parameter, whole.
        part: the index of this source's share in the parameter.
        grouped_shape: the shape of the source with its fused axes apart.
        order: the parameter's axes as numbers of the source's axes, apart.
    """

    source: str
    source_shape: tuple[int, ...]
    target: Parameter
    part: tuple[slice, ...]
    grouped_shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def is_whole_as_stored(self) -> bool:
        """Whether the source tensor is the parameter, element for element in the same order."""
        return self.grouped_shape == self.target.shape and self.order == tuple(range(len(self.order)))

    def store(self, source: np.ndarray, parameter: np.ndarray) -> None:
        """Write the source tensor into its share of the whole parameter, with a cast where the dtypes differ."""
        parameter[self.part] = source.reshape(self.grouped_shape).transpose(self.order)

    def to_source(self, target: np.ndarray) -> np.ndarray:
        """The source tensor out of the whole parameter: the inverse of `store`."""
        return target[self.part].transpose(np.argsort(self.order)).reshape(self.source_shape)


def placements(config: ModelConfig) -> tuple[Placement, ...]:
    """The weight map for `config`: one placement per tensor of its Hugging Face checkpoint, parameter by parameter."""
    found: dict[str, list[Placement]] = {}
    for row in ROWS:
        if (row.when and not getattr(config, row.when)) or (row.unless and getattr(config, row.unless)):
            continue
        for layer in range(config.num_layers if "{i}" in row.source else 1):
            placement = _place(row, layer, config)
            found.setdefault(placement.target.path, []).append(placement)
    return tuple(placement for group in found.values() for placement in group)


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """Every parameter of `config`, once."""
    return tuple(dict.fromkeys(placement.target for placement in placements(config)))


def match_sources(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, str]:
    """Which tensor of a checkpoint fills each placement: source name of the map -> name in the checkpoint.

    Every tensor in `shapes` is consumed exactly once, or is known to carry nothing (`IGNORED`, `TIED_COPIES`, whose
    contents the reader compares).

    Raises:
        CheckpointError: tensors are missing, left over, or have another shape than `config` says.
    """
    wanted = {placement.source: placement for placement in placements(config)}
    bare = not any(name.startswith(BASE_PREFIX) for name in shapes)
    named = {source: source.removeprefix(BASE_PREFIX) if bare else source for source in wanted}
    ignored = {name for name in shapes if any(fnmatch.fnmatchcase(f".{name}", pattern) for pattern in IGNORED)}
    ignored |= {copy for copy in tied_copies(shapes, config)}
    missing = [name for name in named.values() if name not in shapes]
    left = sorted(set(shapes) - set(named.values()) - ignored)
    if missing or left:
        raise CheckpointError(
            f"the tensors do not match {config.architecture}: "
            + "; ".join(
                f"{word}: {some_of(names)}" for word, names in (("missing", missing), ("left over", left)) if names
            )
        )
    for source, placement in wanted.items():
        if tuple(shapes[named[source]]) != placement.source_shape:
            raise CheckpointError(
                f"{named[source]} has shape {list(shapes[named[source]])}, "
                f"but the configuration asks for {list(placement.source_shape)}"
            )
    return named


def tied_copies(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, str]:
    """Tensors of a checkpoint that repeat another one because embeddings are tied: name of the copy -> original."""
    if not config.tie_word_embeddings:
        return {}
    found = {}
    for copy, original in TIED_COPIES.items():
        if copy in shapes:
            found[copy] = original if original in shapes else original.removeprefix(BASE_PREFIX)
    return found


def _place(row: Row, layer: int, config: ModelConfig) -> Placement:
    sizes = {
        "v": config.vocab_size, "h": config.hidden_size, "f": config.intermediate_size,
        "kv": config.num_kv_heads, "g": config.group_size, "d": config.head_dim,
    }  # fmt: skip
    # Where each source stands on the shared axis: (start, length), and the length of the whole axis.
    group = config.group_size
    slots = {"q": (0, group), "k": (group, 1), "v": (group + 1, 1), "gate": (0, 1), "up": (1, 1)}
    total = {"q": group + 2, "k": group + 2, "v": group + 2, "gate": 2, "up": 2}

    left, right = row.axes.split(" -> ")
    target_axes = right.split()
    source_axes = left.replace("(", " ( ").replace(")", " ) ").split()
    apart = [axis for axis in source_axes if axis not in "()"]
    part_sizes, whole_sizes = dict(sizes), dict(sizes)
    part = [slice(None)] * len(target_axes)
    if row.slot:
        start, length = slots[row.slot]
        part_sizes["slot"], whole_sizes["slot"] = length, total[row.slot]
        part[target_axes.index("slot")] = slice(start, start + length)
    split = next((axis for axis in SHARDED_AXES if axis in target_axes), None)
    return Placement(
        source=row.source.format(i=layer),
        source_shape=_fused_shape(source_axes, part_sizes),
        target=Parameter(
            path=row.target.format(i=layer),
            shape=tuple(whole_sizes[axis] for axis in target_axes),
            axes=tuple(target_axes),
            spec=PartitionSpec(*(MESH_AXIS if axis == split else None for axis in target_axes)),
        ),
        part=tuple(part),
        grouped_shape=tuple(part_sizes[axis] for axis in apart),
        order=tuple(apart.index(axis) for axis in target_axes),
    )


def _fused_shape(axes: list[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of axes, where those between parentheses count as one."""
    shape: list[int] = []
    fused: list[int] | None = None
    for axis in axes:
        if axis == "(":
            fused = []
        elif axis == ")":
            shape.append(math.prod(fused or ()))
            fused = None
        elif fused is None:
            shape.append(sizes[axis])
        else:
            fused.append(sizes[axis])
    return tuple(shape)

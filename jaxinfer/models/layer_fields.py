"""Readers of what differs between the layers of a family: windows, rotations and heads by layer, and their inverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, flag, size
from jaxinfer.models.layer_config import LayerConfig, main_rope
from jaxinfer.models.rope import RopeConfig
from jaxinfer.models.rope_fields import RopeReading, is_by_layer_type, read_rope, rope_fields, write_rope

FULL, SLIDING = "full_attention", "sliding_attention"
type Fields = Mapping[str, Any]
type Layers = Sequence[LayerConfig]


@dataclass(frozen=True)
class LayerFields:
    """Mapping of a family's `config.json` to its layers: a reader, its inverse and the fields' names.

    Reading takes all fields and the layer that the common ones describe, and raises UnsupportedConfigError. What is
    written is read back as the same layers.
    """

    read: Callable[[Fields, LayerConfig], list[LayerConfig]]
    write: Callable[[Layers], dict[str, Any]]
    names: frozenset[str]
    reads_rope: bool = False  # the reader reads rotations as well, else the common one is that of all layers


def slides_by_type(values: Fields, default: Callable[[int, int], bool]) -> list[bool]:
    """Return which layers have a window: as `layer_types` says, or as `default` of a layer's number and their number.

    Raises:
        UnsupportedConfigError: `layer_types` is no list of two known types, or names a window that has no size.
    """
    num_layers, found = size(values, "num_hidden_layers"), values.get("layer_types")
    if found is None:
        return [default(number, num_layers) for number in range(num_layers)]
    if not isinstance(found, list) or len(found) != num_layers:
        raise UnsupportedConfigError(f"config.json must set layer_types to a list of {num_layers} types, got {found!r}")
    other = sorted({str(name) for name in found} - {FULL, SLIDING})
    if other:
        raise UnsupportedConfigError(f"layer_types contains {', '.join(other)}; {FULL} and {SLIDING} are supported")
    return [name == SLIDING for name in found]


def window_of(values: Fields) -> int | None:
    """Return `sliding_window`, which may be null."""
    return None if values.get("sliding_window") is None else size(values, "sliding_window")


def _windowed(values: Fields, layer: LayerConfig, slides: Sequence[bool]) -> list[LayerConfig]:
    """Return layers like `layer`, some of them with the window."""
    window = window_of(values)
    if window is None and any(slides):
        raise UnsupportedConfigError("layers have a window by layer_types, but sliding_window is not set")
    return [replace(layer, window=window if is_sliding else None) for is_sliding in slides]


def _types(layers: Layers) -> dict[str, Any]:
    return {"layer_types": [FULL if layer.window is None else SLIDING for layer in layers]}


def _window(layers: Layers) -> dict[str, Any]:
    """Return the one window that layers have; several cannot be told, and differ when they are read back."""
    return {"sliding_window": next((layer.window for layer in layers if layer.window is not None), None)}


def _common_rope(layers: Layers) -> dict[str, Any]:
    rope = main_rope(layers)
    return {} if rope is None else {"rope_parameters": write_rope(rope)}


# Mistral: all layers have the window if there is one; a file with layer_types says which.
def _read_mistral(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    return _windowed(values, layer, slides_by_type(values, lambda number, count: window_of(values) is not None))


def _write_mistral(layers: Layers) -> dict[str, Any]:
    windows = {layer.window for layer in layers}
    return _window(layers) | (_types(layers) if len(windows) > 1 else {})


# Phi-3, Mixtral and Ministral 3: all layers have the window if there is one; layer_types are not read.
def _read_all(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    slides = [window_of(values) is not None] * size(values, "num_hidden_layers")
    if slides_by_type(values, lambda number, count: slides[number]) != slides:
        raise UnsupportedConfigError("layer_types differ from sliding_window, which is for all layers of this family")
    return _windowed(values, layer, slides)


# Qwen2 and Qwen3: with use_sliding_window the layers from max_window_layers on, or those of layer_types.
def _read_qwen(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    is_on = flag(values, "use_sliding_window") and window_of(values) is not None
    if not is_on:
        # Without the switch transformers has no window, whatever sliding_window says.
        slides = slides_by_type(values, lambda number, count: False)
        return _windowed({**values, "sliding_window": None}, layer, slides)
    start = size(values, "max_window_layers", 0)
    return _windowed(values, layer, slides_by_type(values, lambda number, count: number >= start))


def _write_qwen3_moe(layers: Layers) -> dict[str, Any]:
    is_on = any(layer.window is not None for layer in layers)  # the switch is off by default
    return _window(layers) | {"use_sliding_window": True} if is_on else {}


def _write_switched(layers: Layers) -> dict[str, Any]:
    found = _write_qwen3_moe(layers)
    return found | _types(layers) if found else {}


# Qwen3-MoE: with use_sliding_window all layers; layer_types and max_window_layers are not read.
def _read_qwen3_moe(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    count = size(values, "num_hidden_layers")
    is_on = flag(values, "use_sliding_window") and window_of(values) is not None
    if not is_on and any(slides_by_type(values, lambda number, count: False)):
        raise UnsupportedConfigError("layer_types contains sliding_attention, which this family does not read")
    return _windowed(values, layer, [is_on] * count)


# Qwen2-MoE: with use_sliding_window every second layer below max_window_layers.
def _read_qwen2_moe(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    is_on = flag(values, "use_sliding_window") and window_of(values) is not None
    end = size(values, "max_window_layers", 0) if is_on else 0
    slides = slides_by_type(values, lambda number, count: number % 2 == 0 and number < end)
    return _windowed(values if is_on else {**values, "sliding_window": None}, layer, slides)


# gpt-oss and Gemma 2: every second layer has the window, the first one too.
def _read_alternating(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    return _windowed(values, layer, slides_by_type(values, lambda number, count: number % 2 == 0))


def _write_typed(layers: Layers) -> dict[str, Any]:
    # Some classes of transformers take no null.
    return _types(layers) | {name: window for name, window in _window(layers).items() if window is not None}


def _ropes_by_type(
    values: Fields, layers: Layers, *, full: dict[str, Any], sliding: dict[str, Any], has_partial: bool = False
) -> list[LayerConfig]:
    """Return layers rotated as `rope_parameters` says by type of layers; an older `rope_scaling` is for full ones.

    Args:
        full, sliding: parameters of layers of either type where none are given; where some are, "rope_theta" counts.
    """
    name, given = rope_fields(values)
    by_type = {FULL: dict(full), SLIDING: dict(sliding)}
    if is_by_layer_type(given):
        other = sorted(set(given) - {FULL, SLIDING})
        if other:
            raise UnsupportedConfigError(f"{name} per layer type are not supported: {', '.join(other)}")
        by_type |= {key: dict(value) for key, value in given.items() if value is not None}
    elif name == "rope_scaling":
        by_type[FULL] = dict(given)
    elif given:  # transformers ignores it, or fails
        raise UnsupportedConfigError(f"{name} must be given by type of layers, {FULL} and {SLIDING}, got {dict(given)}")
    share = values.get("partial_rotary_factor")
    if share not in (None, 1) and any("partial_rotary_factor" not in each for each in by_type.values()):
        raise UnsupportedConfigError(f"partial_rotary_factor={share} is not supported; {name} by type of layers has it")
    # transformers looks for `truncate` one level too high, so it is true whatever a layer type's parameters say.
    found = {key: {k: v for k, v in parameters.items() if k != "truncate"} for key, parameters in by_type.items()}
    readings = {
        key: RopeReading(defaults={"rope_theta": own["rope_theta"]}, has_partial=has_partial)
        for key, own in ((FULL, full), (SLIDING, sliding))
    }
    fields = {"max_position_embeddings": values["max_position_embeddings"]}
    ropes: dict[tuple[str, int], RopeConfig] = {}

    def rope_of(layer: LayerConfig) -> RopeConfig:
        key = FULL if layer.window is None else SLIDING
        if (key, layer.head_dim) not in ropes:
            ropes[key, layer.head_dim] = read_rope(
                fields, layer.head_dim, readings[key], name=f"{name} of {key}", given=found[key]
            )
        return ropes[key, layer.head_dim]

    return [replace(layer, rope=rope_of(layer)) for layer in layers]


def _write_ropes(layers: Layers, *, has_partial: bool = False) -> dict[str, Any]:
    """Return the rotations by type of layers; the inverse of `_ropes_by_type`."""
    found: dict[str, Any] = {}
    for layer in layers:
        assert layer.rope is not None
        share = {"partial_rotary_factor": layer.rope.partial_rotary_factor} if has_partial else {}
        found.setdefault(FULL if layer.window is None else SLIDING, write_rope(layer.rope) | share)
    return {"rope_parameters": found}


def _slides_by_pattern(values: Fields) -> list[bool]:
    """Return which layers have a window: without types, the last of every `sliding_window_pattern` layers has none."""
    name = "sliding_window_pattern"
    found = values.get(name) if values.get("layer_types") is None else 1
    period = len(found) if isinstance(found, str) and found else size({name: found}, name)
    return slides_by_type(values, lambda number, count: (number + 1) % period != 0)


# Gemma 3: windows by a pattern; two bases.
def _read_gemma3(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    layers = _windowed(values, layer, _slides_by_pattern(values))
    local = values.get("rope_local_base_freq")
    return _ropes_by_type(
        values, layers,
        full={"rope_theta": 1e6 if values.get("rope_theta") is None else values["rope_theta"]},
        sliding={"rope_theta": 1e4 if local is None else local},
    )  # fmt: skip


def _write_gemma3(layers: Layers) -> dict[str, Any]:
    return _write_typed(layers) | _write_ropes(layers)


# OLMo 3: every fourth layer is full; scaling is for full layers alone.
def _read_olmo3(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    layers = _windowed(values, layer, slides_by_type(values, lambda number, count: (number + 1) % 4 != 0))
    theta = {"rope_theta": 5e5 if values.get("rope_theta") is None else values["rope_theta"]}
    # transformers gives sliding layers this base even if rope_theta says otherwise.
    return _ropes_by_type(values, layers, full=theta, sliding={"rope_theta": 5e5})


# EXAONE 4: windows by a pattern, full layers not rotated; without a window all are full and rotated.
def _read_exaone4(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    rope = read_rope(values, layer.head_dim)
    if window_of(values) is None:
        return _windowed(values, replace(layer, rope=rope), slides_by_type(values, lambda number, count: False))
    layers = _windowed(values, layer, _slides_by_pattern(values))
    return [replace(layer, rope=None if layer.window is None else rope) for layer in layers]


def _write_exaone4(layers: Layers) -> dict[str, Any]:
    return _types(layers) | _window(layers) | _common_rope(layers)


# SmolLM3: a 1 in no_rope_layers means rotated.
def _read_smollm3(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    count, found = size(values, "num_hidden_layers"), values.get("no_rope_layers")
    if found is None:
        interval = size(values, "no_rope_layer_interval")
        found = [int((number + 1) % interval != 0) for number in range(count)]
    if not isinstance(found, list) or len(found) != count or any(each not in (0, 1) for each in found):
        raise UnsupportedConfigError(
            f"config.json must set no_rope_layers to 0 or 1 for each of {count} layers, got {found!r}"
        )
    if any(slides_by_type(values, lambda number, count: False)):
        raise UnsupportedConfigError(f"layer_types contains {SLIDING}, which is not supported for this family")
    rope = read_rope(values, layer.head_dim)
    return [replace(layer, rope=rope if is_rotated else None) for is_rotated in found]


def _write_smollm3(layers: Layers) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer.rope is not None) for layer in layers]} | _types(layers) | _common_rope(layers)


# Muse Glimmer: every fourth layer, counted from the last, is full; layers of theta 0 are not rotated.
def _read_muse(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    count, found = size(values, "num_hidden_layers"), values.get("layer_rope_theta")
    if found is None:
        found = [0 if (count - 1 - number) % 4 == 0 else 1 for number in range(count)]
    if not isinstance(found, list) or len(found) != count:
        raise UnsupportedConfigError(
            f"config.json must set layer_rope_theta to a number for each of {count} layers, got {found!r}"
        )
    layers = _windowed(values, layer, slides_by_type(values, lambda number, count: (count - 1 - number) % 4 != 0))
    rope = read_rope(values, layer.head_dim)
    return [replace(layer, rope=rope if theta else None) for layer, theta in zip(layers, found, strict=True)]


def _write_muse(layers: Layers) -> dict[str, Any]:
    thetas = [0 if layer.rope is None else layer.rope.theta for layer in layers]
    return _write_typed(layers) | {"layer_rope_theta": thetas} | _common_rope(layers)


# Laguna: rotations by type of layers, and numbers of query heads by layer.
def _read_laguna(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    count = size(values, "num_hidden_layers")
    heads = values.get("num_attention_heads_per_layer")
    heads = [layer.num_heads] * count if heads is None else heads
    if not isinstance(heads, list) or len(heads) != count or any(not isinstance(n, int) or n < 1 for n in heads):
        raise UnsupportedConfigError(
            f"config.json must set num_attention_heads_per_layer to {count} positive integers, got {heads!r}"
        )
    layers = _windowed(values, layer, slides_by_type(values, lambda number, count: False))
    layers = [replace(layer, num_heads=number) for layer, number in zip(layers, heads, strict=True)]
    return _ropes_by_type(
        values, layers, full={"rope_theta": 5e5, "partial_rotary_factor": 0.5}, sliding={"rope_theta": 1e4},
        has_partial=True,
    )  # fmt: skip


def _write_laguna(layers: Layers) -> dict[str, Any]:
    heads = {"num_attention_heads_per_layer": [layer.num_heads for layer in layers]}
    return _write_typed(layers) | _write_ropes(layers, has_partial=True) | heads


# Gemma 4: every sixth layer is full, and the last; full layers have heads of their own, whose values may be keys.
def _read_gemma4(values: Fields, layer: LayerConfig) -> list[LayerConfig]:
    slides = slides_by_type(values, lambda number, count: (number + 1) % 6 != 0)
    slides[-1] = False
    layers = _windowed(values, layer, slides)
    are_keys = flag(values, "attention_k_eq_v")
    own = _gemma4_heads(values, layer, slides, are_keys)
    layers = [
        each if each.window is not None else replace(each, **own.get(number, {}), values_are_keys=are_keys)
        for number, each in enumerate(layers)
    ]
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    layers = _ropes_by_type(values, layers, full=full, sliding={"rope_theta": 1e4}, has_partial=True)
    return _sharing(values, layers)


def _sharing(values: Fields, layers: list[LayerConfig]) -> list[LayerConfig]:
    """Return layers of which the last `num_kv_shared_layers` read the keys and values of the last other layer of their
    type; with `use_double_wide_mlp` their MLPs are twice as wide."""
    count = size(values, "num_kv_shared_layers", 0)
    if not count:
        return layers
    first = len(layers) - count
    last = {layer.window is None: number for number, layer in enumerate(layers[: max(first, 0)])}
    if any((layer.window is None) not in last for layer in layers):
        raise UnsupportedConfigError(f"num_kv_shared_layers={count} leaves no layer of some type to read keys from")
    wide = 2 * size(values, "intermediate_size") if flag(values, "use_double_wide_mlp") else None
    return [
        replace(layer, kv_from=last[layer.window is None], values_are_keys=False, mlp_size=wide)
        if number >= first
        else replace(layer, is_read_later=number in last.values())
        for number, layer in enumerate(layers)
    ]


def _gemma4_heads(
    values: Fields, layer: LayerConfig, slides: Sequence[bool], are_keys: bool
) -> dict[int, dict[str, int]]:
    """Return what full layers have of their own: as `per_layer_config` says, or the older two fields."""
    given = values.get("per_layer_config")
    if given is None:
        own = {"head_dim": 512 if values.get("global_head_dim") is None else size(values, "global_head_dim")}
        if are_keys and values.get("num_global_key_value_heads") is not None:
            own["num_kv_heads"] = size(values, "num_global_key_value_heads")
        return {number: own for number, is_sliding in enumerate(slides) if not is_sliding}
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"per_layer_config must be an object, got {given!r}")
    found: dict[int, dict[str, int]] = {}
    for key, fields in given.items():
        if not str(key).isdigit() or int(key) >= len(slides) or not isinstance(fields, Mapping):
            raise UnsupportedConfigError(f"per_layer_config must map numbers of layers to fields, got {key!r}")
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise UnsupportedConfigError(f"per_layer_config sets {', '.join(unknown)}, which is not supported")
        if slides[int(key)]:
            raise UnsupportedConfigError(f"per_layer_config sets layer {key}, which has a window: not supported")
        found[int(key)] = {names[name]: size(fields, name) for name in fields}
    return found


def _write_gemma4(layers: Layers) -> dict[str, Any]:
    full = [layer for layer in layers if layer.window is None]
    own = {
        str(number): {"head_dim": layer.head_dim, "num_key_value_heads": layer.num_kv_heads}
        for number, layer in enumerate(layers)
        if layer.window is None
    }
    return _write_typed(layers) | _write_ropes(layers, has_partial=True) | {
        "per_layer_config": own, "attention_k_eq_v": full[0].values_are_keys,
        "num_kv_shared_layers": sum(layer.kv_from is not None for layer in layers),
        "use_double_wide_mlp": any(layer.mlp_size is not None for layer in layers),
    }  # fmt: skip


_TYPED = frozenset({"layer_types", "sliding_window"})
_SWITCHED = _TYPED | {"use_sliding_window", "max_window_layers"}
_PATTERN = _TYPED | {"sliding_window_pattern"}

MISTRAL_LAYERS = LayerFields(_read_mistral, _write_mistral, _TYPED)
ALL_WINDOWED = LayerFields(_read_all, _window, _TYPED)
QWEN_LAYERS = LayerFields(_read_qwen, _write_switched, _SWITCHED)
QWEN2_MOE_LAYERS = LayerFields(_read_qwen2_moe, _write_switched, _SWITCHED)
QWEN3_MOE_LAYERS = LayerFields(_read_qwen3_moe, _write_qwen3_moe, _SWITCHED)
ALTERNATING = LayerFields(_read_alternating, _write_typed, _TYPED)
GEMMA3_LAYERS = LayerFields(_read_gemma3, _write_gemma3, _PATTERN | {"rope_local_base_freq"}, reads_rope=True)
OLMO3_LAYERS = LayerFields(_read_olmo3, _write_gemma3, _TYPED, reads_rope=True)
EXAONE4_LAYERS = LayerFields(_read_exaone4, _write_exaone4, _PATTERN, reads_rope=True)
SMOLLM3_LAYERS = LayerFields(
    _read_smollm3, _write_smollm3, frozenset({"layer_types", "no_rope_layers", "no_rope_layer_interval"}),
    reads_rope=True,
)  # fmt: skip
MUSE_LAYERS = LayerFields(_read_muse, _write_muse, _TYPED | {"layer_rope_theta"}, reads_rope=True)
LAGUNA_LAYERS = LayerFields(_read_laguna, _write_laguna, _TYPED | {"num_attention_heads_per_layer"}, reads_rope=True)
GEMMA4_LAYERS = LayerFields(
    _read_gemma4,
    _write_gemma4,
    _TYPED | {"global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config",
              "num_kv_shared_layers", "use_double_wide_mlp"},
    reads_rope=True,
)  # fmt: skip

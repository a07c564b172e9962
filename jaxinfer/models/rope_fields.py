"""Rotary fields of a Hugging Face `config.json`, in their older and newer form, and the configuration they describe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.models.config_fields import UnsupportedConfigError, size
from jaxinfer.models.rope import RopeConfig

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
}  # fmt: skip


# Parameters of yarn of which 0 means that they are not set.
_ABSENT_IF_0 = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})


@dataclass(frozen=True)
class RopeReading:
    """What a family's rotary parameters mean beyond the common format.

    Attributes:
        absent: the parameters where none are set.
        defaults: values of single parameters that are omitted, by their names.
        has_partial: a part of a head may be rotated.
        has_alpha: with `alpha`, "dynamic" means another base, at every length.
        names: other names of rotary types.
        ignored: parameters that are read elsewhere, or not at all.
        types: rotary types that the family has. Keys turn with a sequence's length in longrope, and transformers drops
            its cache there for Phi-3 alone; in other families, its tokens depend on what was cached.
    """

    absent: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_partial: bool = False
    has_alpha: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    types: Collection[str] = frozenset(_KEYS) - {"longrope"}


def rope_fields(values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the rotary field that is set and its value; the older name wins where both are.

    Raises:
        UnsupportedConfigError: it is no object.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = values.get(name) or {}
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"{name} must be an object, got {given!r}")
    return name, given


def is_by_layer_type(given: Mapping[str, Any]) -> bool:
    """Whether rotary parameters are given for each type of layers."""
    return any(isinstance(value, Mapping) for value in given.values())


def read_rope(
    values: Mapping[str, Any],
    head_dim: int,
    reading: RopeReading | None = None,
    *,
    name: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> RopeConfig:
    """Return the rotary configuration of heads of `head_dim` dimensions.

    Args:
        values: fields of the whole `config.json`, in which what the rotary parameters omit is looked for.
        reading: what the family's parameters mean; None: the common format.
        name, given: the rotary parameters and their name, for messages; None: those of `values`.

    Raises:
        UnsupportedConfigError: no code here computes it; the message names the parameter.
    """
    reading = reading or RopeReading()
    if given is None:
        name, given = rope_fields(values)
        given = given or reading.absent
    if is_by_layer_type(given):
        raise UnsupportedConfigError(f"{name} per layer type are not supported: {', '.join(given)}")
    scaling: dict[str, Any] = {
        key: value for key, value in given.items() if value is not None and key not in reading.ignored
    }
    scaling = {key: value for key, value in scaling.items() if value != 0 or key not in _ABSENT_IF_0}
    old_name = scaling.pop("type", reading.defaults.get("rope_type", "default"))
    rope_type = scaling.pop("rope_type", old_name)
    rope_type = reading.names.get(rope_type, rope_type)
    if rope_type not in reading.types:
        allowed = ", ".join(each for each in _KEYS if each in reading.types)
        raise UnsupportedConfigError(f"rope_type={rope_type!r} is not supported; allowed: {allowed}")

    def found(key: str, default: Any) -> Any:
        """Return a parameter that may be given here or beside the rotary parameters."""
        here = scaling.pop(key, None)
        value = values.get(key) if here is None else here
        return reading.defaults.get(key, default) if value is None else value

    theta, partial = found("rope_theta", 10000.0), found("partial_rotary_factor", None)
    if partial is None and values.get("rotary_dim") is not None:
        partial = size(values, "rotary_dim") / head_dim
    if partial not in (None, 1) and not reading.has_partial:
        raise UnsupportedConfigError(f"partial_rotary_factor={partial} is not supported")
    # Hugging Face writes the pretraining length beside any type, here or one level up; not all types use it.
    max_positions = size(values, "max_position_embeddings")
    original = scaling.pop("original_max_position_embeddings", None)
    original = values.get("original_max_position_embeddings") or original
    if rope_type == "dynamic" and reading.has_alpha and "alpha" in scaling:
        rope_type, theta, scaling = "default", theta * scaling["alpha"] ** (head_dim / (head_dim - 2)), {}
    unknown = sorted(set(scaling) - _KEYS[rope_type])
    if unknown:
        raise UnsupportedConfigError(f"rope_type={rope_type!r} does not know {', '.join(unknown)}")
    if rope_type == "yarn" and "factor" not in scaling and original is None:
        raise UnsupportedConfigError(f"{name} of rope_type='yarn' lacks factor")
    if rope_type == "longrope":
        scaling |= {key: _divisors(name, key, scaling.get(key), head_dim, partial) for key in _DIVISORS}
    try:
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            partial_rotary_factor=1.0 if partial is None else partial,
            max_position_embeddings=max_positions,
            original_max_position_embeddings=max_positions if original is None else original,
            **scaling,
        )
    except ValueError as error:
        raise UnsupportedConfigError(f"{name}: {error}") from error


_DIVISORS = ("short_factor", "long_factor")


def _divisors(name: str | None, key: str, found: Any, head_dim: int, partial: float | None) -> tuple[float, ...]:
    wanted = int(head_dim * (partial or 1)) // 2
    if not isinstance(found, (list, tuple)) or len(found) != wanted:
        raise UnsupportedConfigError(f"{name} must set {key} to a list of {wanted} numbers, got {found!r}")
    return tuple(found)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the rotary parameters in their newer form, without a rotated share; the inverse of `read_rope`."""
    values: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    names = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim")  # fmt: skip
    values |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    if rope.rope_type in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.rope_type == "longrope":
        values |= {"short_factor": list(rope.short_factor or ()), "long_factor": list(rope.long_factor or ())}
    if not rope.truncate:
        values["truncate"] = False
    return values

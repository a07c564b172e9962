"""Rotary position embeddings: default, linear, dynamic (NTK), llama3, yarn, longrope and proportional frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary frequencies; field names follow Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    theta: float = 10000.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # longrope: divisors of the frequencies, of sequences up to the original length and of longer ones
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    # Rotated share of a head: its first dimensions; of the type "proportional", the first of all its pairs.
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        needed = {
            "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": (), "proportional": (),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor"),
        }  # fmt: skip
        if self.rope_type not in needed:
            raise ValueError(f"rope_type must be one of {', '.join(needed)}, got {self.rope_type!r}")
        for name in needed[self.rope_type]:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type={self.rope_type!r} needs {name}")
        for name in (
            "theta", "max_position_embeddings", "original_max_position_embeddings", "factor", "low_freq_factor",
            "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate must be true or false, got {self.truncate!r}")
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:  # type: ignore[operator]
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be less than high_freq_factor ({self.high_freq_factor})"
            )
        for name in ("short_factor", "long_factor"):
            _check_divisors(name, getattr(self, name))
        share = self.partial_rotary_factor
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {share!r}")
        object.__setattr__(self, "theta", float(self.theta))

    def rotary_dim(self, head_dim: int) -> int:
        """Number of dimensions of a head that are paired with each other; some pairs may have the frequency 0."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies change with the sequence's length (beyond `max_position_embeddings`)."""
        return self.rope_type == "dynamic"

    @property
    def turning_length(self) -> int | None:
        """Most tokens of a sequence with the short factors of longrope: one more, and all its keys change; None: no
        length changes keys that are computed."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None


def _check_divisors(name: str, values: tuple[float, ...] | None) -> None:
    for value in values or ():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{name} must consist of positive numbers, got {value!r}")


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Return frequencies float32 [head_dim / 2] and the factor that scales cos and sin (yarn's attention factor).

    Those of longrope are for sequences up to the original length, see `long_frequencies`.

    Sources: RoPE (Su et al. 2021), position interpolation (linear), Llama 3's frequency bands, YaRN (Peng et al. 2023),
    LongRoPE (Ding et al. 2024), Gemma 4 (proportional).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = (1.0 / (np.float32(config.theta) ** exponent)).astype(np.float32)
    if config.rope_type in ("default", "dynamic"):
        return base, 1.0
    if config.rope_type == "linear":
        assert config.factor is not None
        return (base / config.factor).astype(np.float32), 1.0
    if config.rope_type == "llama3":
        return _llama3(config, base), 1.0
    if config.rope_type == "proportional":
        pairs = int(config.partial_rotary_factor * head_dim // 2)
        turning = np.arange(head_dim // 2) < pairs
        return np.where(turning, base / np.float32(config.factor or 1.0), 0).astype(np.float32), 1.0
    if config.rope_type == "longrope":
        return _divided(base, config.short_factor), _longrope_scale(config)
    return _yarn(config, base, head_dim)


def long_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the frequencies float32 [head_dim / 2] of longrope for sequences above the original length."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return _divided((1.0 / (np.float32(config.theta) ** exponent)).astype(np.float32), config.long_factor)


def _divided(base: np.ndarray, divisors: tuple[float, ...] | None) -> np.ndarray:
    assert divisors is not None and len(divisors) == len(base)
    return (base / np.asarray(divisors, np.float32)).astype(np.float32)


def _longrope_scale(config: RopeConfig) -> float:
    """Return the factor of cos and sin, which is the same for sequences of all lengths."""
    if config.attention_factor is not None:
        return float(config.attention_factor)
    original = config.original_max_position_embeddings
    growth = config.max_position_embeddings / original if config.factor is None else config.factor
    return 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))


def _llama3(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    assert config.factor is not None and config.low_freq_factor is not None and config.high_freq_factor is not None
    original = config.original_max_position_embeddings
    turns = original * base / (2 * math.pi)  # full rotations within the pretraining length
    # Up to low_freq_factor turns a frequency is interpolated, from high_freq_factor it is kept, between it is a mix.
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return ((1 - keep) * base / config.factor + keep * base).astype(np.float32)


def _yarn(config: RopeConfig, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    original = config.original_max_position_embeddings
    factor = config.factor if config.factor is not None else config.max_position_embeddings / original

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast or 32), dimension_of(config.beta_slow or 1)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    frequencies = (base / factor * ramp + base * (1 - ramp)).astype(np.float32)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = config.attention_factor
    if attention_factor is None:
        if config.mscale and config.mscale_all_dim:
            attention_factor = magnitude(factor, config.mscale) / magnitude(factor, config.mscale_all_dim)
        else:
            attention_factor = magnitude(factor)
    return frequencies, float(attention_factor)


def _dynamic_angles(config: RopeConfig, head_dim: int, positions: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return angles of NTK-aware scaling: beyond the pretraining length the base grows with the sequence's length."""
    assert config.factor is not None
    maximum = config.max_position_embeddings
    length = jnp.maximum(lengths, maximum).astype(jnp.float32)
    growth = config.factor * length / maximum - (config.factor - 1)
    theta = config.theta * growth ** (head_dim / (head_dim - 2))
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return positions[..., None].astype(jnp.float32) / theta[..., None] ** exponent


def rope_cos_sin(
    config: RopeConfig, head_dim: int, positions: jax.Array, lengths: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, float32 [..., head_dim / 2], of `positions` int32 [...]; 1 and 0 where a head is not rotated.

    A partly rotated head has its dimensions in the order of `order_of_head`.

    The dynamic type and longrope read `lengths` int32 [...]. Dynamic: the length of the sequence when the token was
    first computed (prompt token: the prompt's length; generated token: its position + 1, the default). This is what
    Hugging Face computes for a single sequence, and it does not depend on chunking. Longrope: any length of the
    sequence on the same side of the original one; a sequence that grows beyond it is computed anew.
    """
    rotary_dim = config.rotary_dim(head_dim)
    if config.depends_on_length:
        angles = _dynamic_angles(config, rotary_dim, positions, positions + 1 if lengths is None else lengths)
        scale = 1.0
    else:
        own, scale = inverse_frequencies(config, rotary_dim)
        frequencies = _by_length(config, own, rotary_dim, positions, lengths)
        angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    cos, sin = (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)
    if rotary_dim == head_dim:
        return cos, sin
    rest = [(0, 0)] * (cos.ndim - 1) + [(0, (head_dim - rotary_dim) // 2)]
    return jnp.pad(cos, rest, constant_values=1.0), jnp.pad(sin, rest)


def _by_length(
    config: RopeConfig, frequencies: np.ndarray, rotary_dim: int, positions: jax.Array, lengths: jax.Array | None
) -> jax.Array | np.ndarray:
    """Return the frequencies of each token: those given, or those of long sequences."""
    if config.turning_length is None:
        return frequencies
    is_long = (positions + 1 if lengths is None else lengths) > config.turning_length
    return jnp.where(is_long[..., None], long_frequencies(config, rotary_dim), frequencies)


def order_of_head(head_dim: int, rotary_dim: int, *, in_pairs: bool = False) -> np.ndarray:
    """Return a head's dimensions int[head_dim], numbered as in checkpoints, in the order in which they are stored here.

    Checkpoints rotate a head's first `rotary_dim` dimensions, paired between the halves of these, or each with its
    neighbour (`in_pairs`). Kernels pair dimensions between the halves of the whole head, so here each half holds one
    half of the rotated dimensions, then one half of the others. Queries and keys share the order, so it does not change
    their products.
    """
    rotated, rest = np.split(np.arange(head_dim), [rotary_dim])
    of_rotated = [rotated[::2], rotated[1::2]] if in_pairs else np.split(rotated, 2)
    halves = zip(of_rotated, np.split(rest, 2), strict=True)
    return np.concatenate([part for half in halves for part in half])

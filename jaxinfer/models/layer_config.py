"""What layers of one model may differ in: equal layers share a trace, and a plan of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.models.config_fields import UnsupportedConfigError
from jaxinfer.models.rope import RopeConfig


@dataclass(frozen=True)
class LayerConfig:
    """Attention of one layer: its heads, how they are rotated, and how far back a token sees.

    Attributes:
        num_heads, num_kv_heads, head_dim: geometry of the heads.
        rope: rotation of queries and keys; None: they are not rotated.
        window: number of tokens that a token sees, itself included; None: all before it.
        values_are_keys: values are the projected keys, before their norm and rotation.
        kv_from: number of the earlier layer whose keys and values it reads, instead of its own; None: its own.
        is_read_later: a later layer reads its keys and values.
        mlp_size: intermediate size of its MLP; None: the model's.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = RopeConfig()
    window: int | None = None
    values_are_keys: bool = False
    kv_from: int | None = None
    is_read_later: bool = False
    mlp_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedConfigError(
                f"num_attention_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rope is not None and (self.rotary_dim % 2 or not self.rotary_dim):
            raise UnsupportedConfigError(
                f"partial_rotary_factor={self.rope.partial_rotary_factor} of head_dim={self.head_dim} leaves no even "
                "number of dimensions to rotate"
            )
        if self.window is not None and self.window < 1:
            raise UnsupportedConfigError(f"sliding_window must be a positive number of tokens, got {self.window!r}")

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return self.head_dim if self.rope is None else self.rope.rotary_dim(self.head_dim)

    @property
    def attended(self) -> LayerConfig:
        """What a plan of attention depends on: heads and window."""
        return LayerConfig(self.num_heads, self.num_kv_heads, self.head_dim, None, self.window)


def kinds_of(layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return what differs between the plans of attention of these layers, each once, in order."""
    return tuple(dict.fromkeys(layer.attended for layer in layers))


def main_rope(layers: Sequence[LayerConfig]) -> RopeConfig | None:
    """Return the rotation of the first rotated layer that sees everything, or else of the first rotated one."""
    ropes = [(layer.window is not None, number, layer.rope) for number, layer in enumerate(layers) if layer.rope]
    return min(ropes, key=lambda found: found[:2])[2] if ropes else None

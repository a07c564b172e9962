"""A layer's projected heads before attention, with the norms and the rotation that queries and keys still need."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from kernels_pallas.parts import Parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProjectedHeads:
    """A layer's queries, keys and values as the projection returns them, with norms and rotation still to be applied.

    `rotate` in kernels_pallas/rotate_and_write applies them in plain XLA; a kernel may fuse that with the write of keys
    and values (see `AttentionBackend`). `scale`, `cap`, `window` and `sinks` say how the layer attends.
    """

    # [..., T, num_kv_heads, group + 2, head_dim]: a KV head's queries, its key, its value; without `has_kv` its queries
    qkv: jax.Array | Parts
    cos: jax.Array  # float32 [..., T, head_dim / 2]
    sin: jax.Array  # float32 [..., T, head_dim / 2]
    q_scale: jax.Array | None  # [head_dim], scale of the RMS norm of each head; None: no norms
    k_scale: jax.Array | None  # [head_dim]
    eps: float = field(metadata={"static": True})  # of the norms
    norms_late: bool = field(default=False, metadata={"static": True})  # whether the norms follow the rotation
    scale: float | None = field(default=None, metadata={"static": True})  # factor of scores; None: head_dim ** -0.5
    cap: float | None = field(default=None, metadata={"static": True})  # bound of the scaled scores; None: no bound
    window: int | None = field(default=None, metadata={"static": True})  # tokens that each one sees; None: no limit
    has_kv: bool = field(default=True, metadata={"static": True})  # else they attend to keys that are there already
    keeps_kv: bool = field(default=False, metadata={"static": True})  # a later layer reads these keys and values
    sinks: jax.Array | None = None  # [num_heads], for each head a score without a value; None: there are none

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Numbers of query heads, of key/value heads and of a head's dimensions."""
        values = self.qkv.values if isinstance(self.qkv, Parts) else self.qkv
        kv_heads, width, head_dim = values.shape[-3:]
        return kv_heads * (width - 2 * self.has_kv), kv_heads, head_dim

"""What becomes of a layer's projected heads before attention: norms of queries and keys, and their rotation."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from kernels_pallas.parts import Parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProjectedHeads:
    """A layer's queries, keys and values as they come from the projection, with all that they still need.

    `rotate` of kernels_pallas/rotate_and_write says in plain XLA what that is; a kernel may do the same in one go (see
    `AttentionBackend`).
    """

    qkv: jax.Array | Parts  # [..., T, num_kv_heads, group + 2, head_dim]: a KV head's queries, its key, its value
    cos: jax.Array  # float32 [..., T, head_dim / 2]
    sin: jax.Array  # float32 [..., T, head_dim / 2]
    q_scale: jax.Array | None  # [head_dim], of the RMS norm of each head; None: no norms
    k_scale: jax.Array | None  # [head_dim]
    eps: float = field(metadata={"static": True})  # of the norms

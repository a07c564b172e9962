"""The one interface between a model and its ways of attending."""

from __future__ import annotations

from typing import Protocol

import jax


class Attend(Protocol):
    """How the tokens of a step see each other and the past: the one thing that differs between ways of running."""

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q [..., T, num_heads, head_dim], k and v [..., T, num_kv_heads, head_dim] -> like q. q is not scaled yet."""
        ...

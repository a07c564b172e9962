"""The one interface between a model and its ways of attending."""

from __future__ import annotations

from typing import Protocol

import jax

from jaxinfer.attention.heads import ProjectedHeads

# A layer's keys and values, whatever its `Attend` keeps them in: of the pool, pages of K and of V; None: no past.
type LayerKV = tuple[jax.Array, jax.Array] | None


class Attend(Protocol):
    """How the tokens of a step see each other and the past: the one thing that differs between ways of running.

    A pytree, because it is an argument of the traced layer: arrays are its leaves, and its static parts (functions,
    scales) must be hashable and equal in every step that is to share a trace.
    """

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        """[..., T, num_heads, head_dim]: what the queries of `heads` find; and the layer's keys and values after it."""
        ...

"""The interface through which a model calls attention."""

from __future__ import annotations

from typing import Protocol

import jax

from jaxinfer.attention.heads import ProjectedHeads

# A layer's keys and values in the form that its `Attend` keeps: for the pool, pages of K and of V; None: no past.
type LayerKV = tuple[jax.Array, jax.Array] | None


class Attend(Protocol):
    """The attention of a step: how its tokens see each other and the past. Only this differs between ways of running.

    It is a pytree, because it is an argument of the traced layer: arrays are its leaves, and its static parts
    (functions, scales) must be hashable and equal in every step that is to share a trace.
    """

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        """Return the attention output [..., T, num_heads, head_dim], and the layer's keys and values after it."""
        ...

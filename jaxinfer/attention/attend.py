"""The one interface between a model and its ways of attending."""

from __future__ import annotations

from typing import Protocol

import jax

from jaxinfer.attention.heads import ProjectedHeads


class Attend(Protocol):
    """How the tokens of a step see each other and the past: the one thing that differs between ways of running."""

    def __call__(self, layer: int, heads: ProjectedHeads) -> jax.Array:
        """[..., T, num_heads, head_dim]: what the queries of `heads` find."""
        ...

"""The residual stream between layers, and what the way of running a model has to say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from kernels_pallas.add_and_norm.reference import add_and_norm
from kernels_pallas.parts import Parts


def in_one_piece(rows: int, inner: int, columns: int) -> int:
    """Products are not cut."""
    return 1


@dataclass(frozen=True)
class Residual:
    """How results join the residual stream, and into how many parts (rows, inner, columns) products are cut."""

    add_and_norm: Callable[[jax.Array, jax.Array | Parts, jax.Array, float], tuple[jax.Array, jax.Array]] = add_and_norm
    parts: Callable[[int, int, int], int] = in_one_piece


PLAIN = Residual()

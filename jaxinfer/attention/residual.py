"""The residual stream between layers: its layout, and how results join it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.add_and_norm.reference import add_and_norm
from kernels_pallas.parts import Parts


def in_one_piece(rows: int, inner: int, columns: int) -> int:
    """Return 1 part for every product: none is split."""
    return 1


def on_one_device(
    mixture: Callable[..., jax.Array], given: Sequence[jax.Array], gate_up: jax.Array, down: jax.Array, *bias: jax.Array
) -> jax.Array:
    """Run a mixture whose experts are whole, on one device."""
    return mixture(*given, gate_up, down, *bias)


@dataclass(frozen=True)
class Residual:
    """The layout of activations outside of attention, and the way in which results join the residual stream.

    `parts` maps the sizes (rows, inner, columns) of a product to the number of parts it is split into. `over_experts`
    runs and sums a mixture of experts, whose kernels may be sharded over devices. Activations are [..., T, features]
    and the left operands of products; with `features_first` they are [features, T], and the weights are the left
    operands. Attention has its heads as [..., T, heads, ...] either way.
    """

    add_and_norm: Callable[[jax.Array, jax.Array | Parts, jax.Array, float], tuple[jax.Array, jax.Array]] = add_and_norm
    parts: Callable[[int, int, int], int] = in_one_piece
    features_first: bool = False
    over_experts: Callable[..., jax.Array] = on_one_device

    @property
    def features_axis(self) -> int:
        """The last feature axis."""
        return -2 if self.features_first else -1

    def from_tokens(self, x: jax.Array) -> jax.Array:
        """Return x [..., T, features...], or [T, features...] with `features_first`, in the layout of activations."""
        # The barrier keeps XLA from fusing the transpose into the product, which loses more than it saves.
        return lax.optimization_barrier(jnp.moveaxis(x, 0, -1)) if self.features_first else x

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """Invert `from_tokens`."""
        return jnp.moveaxis(lax.optimization_barrier(x), -1, 0) if self.features_first else x


PLAIN = Residual()
FEATURES_FIRST = Residual(partial(add_and_norm, axis=-2), features_first=True)

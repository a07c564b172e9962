"""State of each running sequence of a bidirectional model that the device keeps between rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.diffusion.blocks import maker_of, notes_of

CANVAS = "canvas"  # the part of the device's state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Canvas:
    """Entries of S seats, for sequences of up to L tokens with blocks of B tokens. Programs take it donated."""

    # Added to the embedding of each token; 0 except for masks. [S, L, hidden], or [S, 0, hidden] without smoothing.
    expected: Any
    noted: Any  # TokenLogprobs [S, B] of the block's tokens in the rounds that committed them
    credits: Any  # float32 [S, B, vocab], see `Credit`; [S, B, 0] for other rules

    @classmethod
    def allocate(
        cls,
        num_seats: int,
        length: int,
        block_size: int,
        hidden_size: int,
        vocab_size: int,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding | None = None,
        *,
        with_credits: bool = False,
        abstract: bool = False,
    ) -> Canvas:
        """Allocate entries of free seats; with `abstract`, only their shapes."""
        make = maker_of(num_seats, sharding, abstract=abstract)
        return cls(
            make(length, hidden_size, dtype=dtype),
            notes_of(make, block_size, vocab_size),
            make(block_size, vocab_size if with_credits else 0, dtype=jnp.float32),
        )

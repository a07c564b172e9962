"""What a step's tokens see in layers with a window, computed on the device from their positions."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.programs.batch_layout import StepBatch
from kernels_pallas.visibility import TAIL_WORD_BITS


def within_window(batch: StepBatch, window: int | None, *, page_size: int) -> StepBatch:
    """Return the batch with what its tokens see of the last `window` positions, their own included; None: of all.

    A window counts positions, and bounds are lane indices: in a lane, the pages of a sequence after the trunk follow
    those of other sequences.
    """
    if window is None:
        return batch
    first = jnp.maximum(batch.positions - (window - 1), 0)
    if batch.is_of_lanes:
        each = batch.positions.shape[0] // batch.num_sequences
        shift = (batch.lane_page[:, 0] - batch.first_page) * page_size
        first = jnp.where(first < batch.trunk_len[batch.row], first, first + jnp.repeat(shift, each))
    if batch.first.shape[0]:
        first = jnp.maximum(first, batch.first)
    return replace(batch, first=first, tail_bits=_bits_within(batch, window))


def _bits_within(batch: StepBatch, window: int) -> jax.Array:
    """Return the tail bits uint32 [T, W] of the tokens of the tail that are within the window."""
    words = batch.tail_bits.shape[1]
    if not words:
        return batch.tail_bits
    assert batch.tail_position is not None
    position = batch.tail_position[batch.row].reshape(-1, words, TAIL_WORD_BITS)
    is_near = position > batch.positions[:, None, None] - window
    bit = jnp.uint32(1) << jnp.arange(TAIL_WORD_BITS, dtype=jnp.uint32)
    near = jnp.sum(jnp.where(is_near, bit, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    return batch.tail_bits & near

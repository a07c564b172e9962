"""Rows of several tokens that the device makes itself: a sequence's latest tokens, and the drafts after them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.sampling.sampler import SamplingBatch


def wide_rows(
    batch: StepBatch, tokens: jax.Array, first: jax.Array, count: jax.Array, *, page_size: int, num_slots: int
) -> StepBatch:
    """Return the batch with the first `count` of `tokens` in each seated sequence, at successive positions; the rest of
    them is padding. Rows of prompts stay as they are.

    Args:
        batch: with R decode rows of one token, or R sequences in lanes.
        tokens: int32 [R, W].
        first: int32 [R], position of a sequence's first token.
        count: int32 [R], 0: the sequence is idle.
        page_size, num_slots: of the pool.

    Returns:
        R decode rows of W tokens, or lanes with W tokens of each sequence. A sequence is sampled after the last of its
        W tokens.
    """
    rows, width = tokens.shape
    assert batch.num_sequences == rows and batch.decode_width == 1
    more = rows * (width - 1)
    offset = jnp.arange(width)
    there = offset < count[:, None]
    position = first[:, None] + offset
    page, lane_index = batch.places(position, page_size=page_size)
    # After the slots of the padding that stays.
    nowhere = num_slots + batch.token_ids.shape[0] + jnp.arange(rows * width).reshape(rows, width)
    token_fields = {
        "token_ids": jnp.where(there, tokens, 0),
        "positions": jnp.where(there, position, 0),
        "lengths": jnp.maximum(batch.lengths[:rows, None], position + 1),
        "slot_mapping": jnp.where(there, page * page_size + position % page_size, nowhere),
        "row": jnp.broadcast_to(batch.row[:rows, None], (rows, width)),
        "limit": jnp.where(there, lane_index, -1),
        "branch": jnp.broadcast_to(batch.branch[:rows, None], (rows, width)),
    }
    row_fields = {}
    starts = batch.query_start_loc * width
    if not batch.is_of_lanes:
        row_fields = dict.fromkeys(("kv_len", "trunk_len", "tail_start"), jnp.where(count > 0, first + count, 0))
        starts = jnp.concatenate([starts[:rows], batch.query_start_loc[rows:] + more])

    def followed_by(own: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.concatenate([own.astype(jnp.int32), others])

    index = batch.logits_index
    return replace(
        batch,
        **{name: followed_by(own.reshape(-1), getattr(batch, name)[rows:]) for name, own in token_fields.items()},
        **{name: followed_by(own, getattr(batch, name)[rows:]) for name, own in row_fields.items()},
        tail_bits=jnp.zeros((batch.token_ids.shape[0] + more, 0), jnp.uint32),
        query_start_loc=starts,
        logits_index=jnp.where(index < rows, index * width + width - 1, index + more),
        decode_width=1 if batch.is_of_lanes else width,
    )


def sampled_everywhere(batch: StepBatch, sampling: SamplingBatch) -> SamplingBatch:
    """Return the sampling after each token [R * W] of a batch of wide rows alone, given that of its rows [R].

    Nothing is sampled after padding.
    """
    width = batch.limit.shape[0] // sampling.sample_position.shape[0]
    sampling = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), sampling)
    return replace(sampling, sample_position=jnp.where(batch.limit >= 0, batch.positions + 1, -1))


def put_tokens(all_rounds: jax.Array, this_round: jax.Array, index: jax.Array) -> jax.Array:
    """Return values of tokens [N * W, Q, ...] of all rounds, in which those [Q, W, ...] of round `index` are put."""
    by_token = jnp.swapaxes(this_round, 0, 1)
    return lax.dynamic_update_slice_in_dim(all_rounds, by_token, index * len(by_token), axis=0)

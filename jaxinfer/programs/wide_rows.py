"""Rows of several tokens that the device makes itself: a sequence's latest tokens, and what is drafted behind them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.sampling.sampler import SamplingBatch


def wide_rows(
    batch: StepBatch, tokens: jax.Array, first: jax.Array, count: jax.Array, *, page_size: int, num_slots: int
) -> StepBatch:
    """The batch with the first `count` of `tokens` in each decode row, at successive places of its lane; the rest of
    them is padding. Rows of prompts stay as they are.

    Args:
        batch: with R decode rows of one token.
        tokens: int32 [R, W].
        first: int32 [R], lane index and position of a row's first token.
        count: int32 [R], 0: the row is idle.
        page_size, num_slots: of the pool.

    Returns:
        R decode rows of W tokens. What was sampled after a row's token is sampled after the last of its W.
    """
    rows, width = tokens.shape
    assert batch.decode_rows == rows and batch.decode_width == 1
    more = rows * (width - 1)
    offset = jnp.arange(width)
    there = offset < count[:, None]
    position = first[:, None] + offset
    page = jnp.take_along_axis(batch.page_table[:rows], position // page_size, axis=1, mode="clip")
    # Behind those of the padding that stays.
    nowhere = num_slots + batch.token_ids.shape[0] + jnp.arange(rows * width).reshape(rows, width)
    of_tokens = {
        "token_ids": jnp.where(there, tokens, 0),
        "positions": jnp.where(there, position, 0),
        "lengths": jnp.maximum(batch.lengths[:rows, None], position + 1),
        "slot_mapping": jnp.where(there, page * page_size + position % page_size, nowhere),
        "row": jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, width)),
        "limit": jnp.where(there, position, -1),
        "branch": jnp.full((rows, width), -1),
    }
    of_rows = dict.fromkeys(("kv_len", "trunk_len", "tail_start"), jnp.where(count > 0, first + count, 0))

    def followed_by(own: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.concatenate([own.astype(jnp.int32), others])

    index = batch.logits_index
    return replace(
        batch,
        **{name: followed_by(own.reshape(-1), getattr(batch, name)[rows:]) for name, own in of_tokens.items()},
        **{name: followed_by(own, getattr(batch, name)[rows:]) for name, own in of_rows.items()},
        tail_bits=jnp.zeros((batch.token_ids.shape[0] + more, 0), jnp.uint32),
        query_start_loc=followed_by(jnp.arange(rows) * width, batch.query_start_loc[rows:] + more),
        logits_index=jnp.where(index < rows, index * width + width - 1, index + more),
        decode_width=width,
    )


def sampled_everywhere(batch: StepBatch, sampling: SamplingBatch) -> SamplingBatch:
    """How the tokens [R * W] after each token of wide rows are sampled, given how those of the rows [R] are.

    At padding nothing is.
    """
    sampling = jax.tree.map(lambda x: jnp.repeat(x, batch.decode_width, axis=0), sampling)
    return replace(sampling, sample_position=jnp.where(batch.limit >= 0, batch.positions + 1, -1))

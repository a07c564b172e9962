"""Tails: where drafted trees are stored on the device, and how batches read them.

Tails are stored in pages that belong to no request, in the pools of target and drafter alike. Each sequence of a launch
has some of them while the launch runs. A round reads nothing there that it has not written itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxinfer.programs.batch_layout import StepBatch
from kernels_pallas.visibility import TAIL_WORD_BITS


@dataclass(frozen=True)
class TailPages:
    """The pages of tails: pages [first + i * each, first + (i + 1) * each) are those of a launch's sequence i."""

    first: int
    each: int
    page_size: int
    per_lane: int  # most sequences of a row

    @property
    def tokens(self) -> int:
        """Number of tokens that a sequence's tail has room for."""
        return self.each * self.page_size

    def of_rows(self, batch: StepBatch) -> jax.Array:
        """Return int32 [R, C], the pages of all tails of each row, one sequence after the other."""
        count = self.each * (min(batch.num_sequences, self.per_lane) if batch.is_of_lanes else 1)
        return self.first + first_sequences(batch)[:, None] * self.each + jnp.arange(count)

    def slots(self, batch: StepBatch, index: jax.Array) -> jax.Array:
        """Return int32 [S, N], the slots of indices int32 [S, N] in the sequences' tails."""
        sequence = jnp.arange(batch.num_sequences)[:, None]
        return (self.first + sequence * self.each) * self.page_size + index

    def offsets(self, batch: StepBatch) -> jax.Array:
        """Return int32 [S], where each sequence's tail starts in the tail of its row."""
        sequence = jnp.arange(batch.num_sequences)
        return (sequence - first_sequences(batch)[batch.row[: batch.num_sequences]]) * self.tokens


def first_sequences(batch: StepBatch) -> jax.Array:
    """Return int32 [R], the first sequence of each row, in a batch with one token per sequence."""
    return batch.query_start_loc[:-1] if batch.is_of_lanes else jnp.arange(batch.page_table.shape[0])


def positions_of_tails(batch: StepBatch, tails: TailPages, positions: jax.Array, words: int) -> jax.Array:
    """Return int32 [R, 32 * words], the position of the token at each index of a row's tail.

    Args:
        positions: int32 [S, N], of the first N tokens of each sequence's tail.
    """
    sequences, count = positions.shape
    rows = batch.row[:sequences] if batch.is_of_lanes else jnp.arange(sequences)
    index = tails.offsets(batch)[:, None] + jnp.arange(count)
    nowhere = jnp.zeros((batch.page_table.shape[0], words * TAIL_WORD_BITS), jnp.int32)
    return nowhere.at[rows[:, None], index].set(positions, mode="drop")


def num_words(num_bits: int) -> int:
    """Return the number of words that hold so many tail bits."""
    return -(-num_bits // TAIL_WORD_BITS)


def one_bit(index: jax.Array, words: int) -> jax.Array:
    """Return uint32 [..., words] with only the bit `index` [...] set."""
    bit = jnp.uint32(1) << (index % TAIL_WORD_BITS).astype(jnp.uint32)
    return jnp.where(jnp.arange(words) == (index // TAIL_WORD_BITS)[..., None], bit[..., None], jnp.uint32(0))


def with_tail(
    batch: StepBatch, pages: jax.Array, bits: jax.Array, *, page_size: int, positions: jax.Array | None = None
) -> StepBatch:
    """Return the batch with a tail after each row's context.

    Args:
        pages: int32 [R, C], of the tails.
        bits: uint32 [T, W], what the tokens see of them.
        positions: int32 [R, 32 * W], of the tokens in them; None: no layer has a window.
    """
    count = (batch.kv_len + page_size - 1) // page_size
    columns = batch.page_table.shape[1] + pages.shape[1]
    column = jnp.arange(columns)
    in_context = column < count[:, None]
    after = jnp.take_along_axis(pages, jnp.clip(column - count[:, None], 0, pages.shape[1] - 1), axis=1)
    table, owner = (
        jnp.pad(x, ((0, 0), (0, pages.shape[1])), mode="edge") for x in (batch.page_table, batch.page_branch)
    )
    return replace(
        batch,
        page_table=jnp.where(in_context, table, after),
        page_branch=jnp.where(in_context, owner, -1),
        kv_len=(count + pages.shape[1]) * page_size,
        tail_start=count * page_size,
        tail_bits=bits,
        tail_position=positions,
    )


def tokens_of_sequences(
    batch: StepBatch,
    tokens: jax.Array,
    *,
    there: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    limit: jax.Array,
    in_use: jax.Array,
    num_slots: int,
) -> StepBatch:
    """Return the batch with N tokens for each of its S sequences in place of one.

    Args:
        batch: of seated sequences alone, with one token for each.
        tokens, there, positions, slots, limit: [S, N] each; where `there` is False is padding.
        in_use: int32 [S], tokens of each sequence before its tail. Batches of lanes keep their own lengths.
        num_slots: of the pool.
    """
    count, width = tokens.shape
    nowhere = num_slots + jnp.arange(count * width).reshape(count, width)
    wide = {
        "token_ids": jnp.where(there, tokens, 0),
        "positions": jnp.where(there, positions, 0),
        "lengths": jnp.maximum(batch.lengths[:, None], positions + 1),
        "slot_mapping": jnp.where(there, slots, nowhere),
        "row": jnp.broadcast_to(batch.row[:, None], (count, width)),
        "limit": jnp.where(there, limit, -1),
        "branch": jnp.broadcast_to(batch.branch[:, None], (count, width)),
    }
    lengths = {} if batch.is_of_lanes else {"kv_len": in_use, "trunk_len": in_use}
    return replace(
        batch,
        **{name: values.astype(jnp.int32).reshape(-1) for name, values in wide.items()},
        **lengths,
        tail_bits=jnp.zeros((count * width, 0), jnp.uint32),
        query_start_loc=batch.query_start_loc * width,
        decode_width=1 if batch.is_of_lanes else width,
    )

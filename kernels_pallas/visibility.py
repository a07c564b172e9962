"""The visibility rule: which lane indices a query token sees. Every backend computes exactly this."""

from __future__ import annotations

import jax
import jax.numpy as jnp

TAIL_WORD_BITS = 32
MAX_TAIL_TOKENS = 512  # limit of the GPU kernel
# From this many words on, a query's word is gathered instead of selected in a loop over all words.
_MANY_WORDS = 4


def visible(
    index: jax.Array,
    *,
    limit: jax.Array,
    branch: jax.Array,
    tail_bits: jax.Array,
    trunk_len: jax.Array,
    tail_start: jax.Array,
    index_branch: jax.Array,
    first: jax.Array | None = None,
) -> jax.Array:
    """Decide whether queries see lane indices; all arguments broadcast against each other.

    Args:
        index: int32, lane indices.
        limit, branch: int32, bounds and branches of the queries.
        tail_bits: uint32 [..., W], tail bits of the queries; leading axes broadcast with the others.
        trunk_len, tail_start: int32, values of the queries' rows.
        index_branch: int32, `page_branch` of the page that holds each index.
        first: int32, lower bounds of the queries, which limit what they see below `tail_start`; None: there are none.

    Returns:
        bool: below `tail_start`, whether the index is within the bounds, and in the trunk or the query's own branch;
        from `tail_start` on, whether the query's tail bit is set.
    """
    in_context = (index <= limit) & ((index < trunk_len) | (index_branch == branch))
    if first is not None:
        in_context &= index >= first
    words = tail_bits.shape[-1]
    if words == 0:
        return (index < tail_start) & in_context
    offset = index - tail_start
    if words >= _MANY_WORDS:
        shape = jnp.broadcast_shapes(offset.shape, tail_bits.shape[:-1])
        offset = jnp.broadcast_to(offset, shape)
        word = jnp.clip(offset // TAIL_WORD_BITS, 0, words - 1)
        # The last axis of `shape` is that of the indices, on which a query's words do not depend.
        of_query = jnp.broadcast_to(tail_bits, (*shape[:-1], 1, words))[..., 0, :]
        value = jnp.take_along_axis(of_query, word, axis=-1)
        bit = (value >> (offset % TAIL_WORD_BITS).astype(jnp.uint32)) & 1
        in_tail = (offset >= 0) & (offset < words * TAIL_WORD_BITS) & (bit == 1)
        return jnp.where(index < tail_start, in_context, in_tail)
    bit = jnp.zeros(jnp.broadcast_shapes(offset.shape, tail_bits.shape[:-1]), bool)
    for word in range(words):
        shift = offset - word * TAIL_WORD_BITS
        here = (shift >= 0) & (shift < TAIL_WORD_BITS)
        # A shift by 32 or more is undefined: out of range offsets are clipped and masked.
        value = (tail_bits[..., word] >> jnp.clip(shift, 0, TAIL_WORD_BITS - 1).astype(jnp.uint32)) & 1
        bit = bit | (here & (value == 1))
    return jnp.where(index < tail_start, in_context, bit)

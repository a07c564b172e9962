"""Query blocks and the pages that each of them reads, computed on the device from a step's integers.

By the visibility rule, a query sees a page's slots between two lane indices, and from `tail_start` on those whose bits
are set. So a block needs bounds and tail bits for each query, and for the whole block the list of pages in which at
least one query sees something. All layers of a step share one plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from kernels_pallas.branch_attention.tuning import QUERY_ROWS, Tuning, aligned_tail_words

# Entries of BlockPlan.header, BlockPlan.pages and BlockPlan.queries. "first" is there if tokens have lower bounds: of a
# query its own, of a block the least.
HEADER = ("first_token", "num_tokens", "full_tiles", "context_tiles", "tiles", "tail_start", "tail_page", "first")
PAGE = ("page", "lane_page", "owner", "context_end")
QUERY = ("own_bound", "trunk_bound", "branch", "first")
# The branch of a query that sees nothing. It does not count when tiles that need no mask are chosen.
IDLE = -3
# The lower bound of a query that sees no context.
_NEVER = jnp.iinfo(jnp.int32).max
_WORD = 32
# Section of a page in a block's list.
_FULL, _CONTEXT, _TAIL, _UNSEEN = range(4)


class StepIntegers(Protocol):
    """A step's tokens in rows: T tokens, R rows, P pages per row, W words of tail bits.

    The first `decode_rows` rows have `decode_width` tokens each; the others hold packed tokens from `query_start_loc`.
    """

    @property
    def limit(self) -> jax.Array: ...  # int32 [T], the highest lane index that the token may see

    @property
    def first(self) -> jax.Array: ...  # int32 [T], the lowest one below the tail; int32 [0]: there is no lower bound

    @property
    def branch(self) -> jax.Array: ...  # int32 [T], -1 for tokens of the trunk

    @property
    def tail_bits(self) -> jax.Array: ...  # uint32 [T, W], bit i: the token sees lane index tail_start + i

    @property
    def page_table(self) -> jax.Array: ...  # int32 [R, P]

    @property
    def page_branch(self) -> jax.Array: ...  # int32 [R, P], the branch that owns the page

    @property
    def kv_len(self) -> jax.Array: ...  # int32 [R]

    @property
    def trunk_len(self) -> jax.Array: ...  # int32 [R]

    @property
    def tail_start(self) -> jax.Array: ...  # int32 [R]

    @property
    def query_start_loc(self) -> jax.Array: ...  # int32 [R + 1]

    @property
    def decode_rows(self) -> int: ...

    @property
    def decode_width(self) -> int: ...

    @property
    def is_branched(self) -> bool:
        """Whether tokens or pages may belong to branches: if not, `branch` and `page_branch` are -1 throughout."""
        ...


@dataclass(frozen=True)
class AttentionSizes:
    """Static sizes of attention, the same in all layers, on which a plan depends besides the step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype  # dtype of the queries
    cache_dtype: jnp.dtype

    @classmethod
    def of(cls, q: jax.Array, k_pages: jax.Array) -> AttentionSizes:
        """Sizes of q [T, num_heads, head_dim] and k_pages [num_pages, page_size, num_kv_heads, head_dim]."""
        return cls(q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1], q.dtype, k_pages.dtype)

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryBlocks:
    """B blocks of consecutive tokens, each of one row, in the order of their tokens."""

    row: jax.Array  # int32 [B]
    first_token: jax.Array  # int32 [B]
    num_tokens: jax.Array  # int32 [B]; 0: the block is empty


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPlan:
    """Inputs of the kernel besides q, K and V. B blocks, C consumers, L pages, W aligned words of tail bits.

    A tile is `tile` tokens of consecutive entries of the page list. First come tiles that every query sees whole, then
    those with context alone, then those with a tail; pages of a section that do not fill a tile join the next section.
    """

    header: jax.Array  # int32 [B, 7 or 8], see HEADER
    pages: jax.Array  # int32 [B, 4, L], see PAGE; entries that pad the last tile have a lane page beyond the lane
    queries: jax.Array  # int32 [B, C, 3 or 4, QUERY_ROWS], see QUERY
    tail_bits: jax.Array | None  # int32 [B, C, W, QUERY_ROWS], bit 0 of word 0 is the first slot of tail_page
    block_tail_bits: jax.Array | None  # int32 [B, W], the union over the block's queries

    @property
    def has_first(self) -> bool:
        return self.queries.shape[2] == len(QUERY)


def decode_blocks(step: StepIntegers, tokens_per_block: int) -> QueryBlocks:
    """Cut the rows of `decode_width` tokens into blocks."""
    per_row = -(-step.decode_width // tokens_per_block)
    row, part = jnp.divmod(jnp.arange(step.decode_rows * per_row, dtype=jnp.int32), per_row)
    done = part * tokens_per_block
    return QueryBlocks(row, row * step.decode_width + done, jnp.minimum(tokens_per_block, step.decode_width - done))


def prefill_blocks(step: StepIntegers, tokens_per_block: int) -> QueryBlocks:
    """Cut the packed rows, and the padding tokens after them, which see nothing and get zeros, into blocks."""
    num_tokens = step.limit.shape[0]
    first_row = step.decode_rows
    packed = num_tokens - first_row * step.decode_width
    starts = jnp.append(step.query_start_loc[first_row:], num_tokens)
    per_row = (jnp.diff(starts) + tokens_per_block - 1) // tokens_per_block
    ends = jnp.cumsum(per_row, dtype=jnp.int32)
    index = jnp.arange(packed // tokens_per_block + per_row.shape[0], dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), per_row.shape[0] - 1).astype(
        jnp.int32
    )
    first = starts[row] + (index - (ends[row] - per_row[row])) * tokens_per_block
    count = jnp.where(index < ends[-1], jnp.clip(starts[row + 1] - first, 0, tokens_per_block), 0)
    last_row = step.page_table.shape[0] - 1
    return QueryBlocks(jnp.minimum(row + first_row, last_row), jnp.where(count > 0, first, num_tokens), count)


def plan_blocks(step: StepIntegers, blocks: QueryBlocks, *, page_size: int, group: int, tuning: Tuning) -> BlockPlan:
    """Compute the queries' bounds and the pages of every block.

    Args:
        group: query heads of one KV head; the heads of a token are consecutive rows.
    """
    num_tokens, tail_words = step.tail_bits.shape
    offset = jnp.arange(tuning.tokens_per_block(group), dtype=jnp.int32)
    token = jnp.minimum(blocks.first_token[:, None] + offset, num_tokens - 1)  # [B, N]
    own = offset < blocks.num_tokens[:, None]
    trunk_len, tail_start = step.trunk_len[blocks.row], step.tail_start[blocks.row]
    own_bound = jnp.where(own, jnp.minimum(step.limit[token] + 1, tail_start[:, None]), 0)
    first = None
    if step.first.shape[0]:
        own_bound = jnp.where(step.first[token] < own_bound, own_bound, 0)
        first = jnp.where(own_bound > 0, step.first[token], _NEVER)
    trunk_bound = jnp.minimum(own_bound, trunk_len[:, None])
    idle = own_bound <= 0
    bits = None
    if tail_words:
        bits = _aligned(jnp.where(own[:, :, None], step.tail_bits[token], jnp.uint32(0)), tail_start % page_size)
        idle = idle & ~jnp.any(bits != 0, axis=-1)
    branch = jnp.where(idle, IDLE, step.branch[token])

    table = step.page_table[blocks.row]  # [B, P]
    pages_per_tile = tuning.tile // page_size
    words = block_words = None
    if not step.is_branched and not tail_words:
        by_all, last = jnp.min(jnp.where(idle, _NEVER, own_bound), axis=1), jnp.max(own_bound, axis=1)
        seen = jnp.minimum(-(-last // page_size), table.shape[1])
        by_all, lowest = jnp.minimum(by_all // page_size, seen), None
        if first is not None:
            least, whole = jnp.min(first, axis=1), -(-jnp.max(jnp.where(idle, 0, first), axis=1) // page_size)
            least = jnp.minimum(least // page_size, seen)
            whole = jnp.clip(whole, least, seen)
            by_all = jnp.maximum(by_all - whole, 0)
            lowest = least, whole, by_all
        pages, listed = _pages_in_order(table, seen, last, pages_per_tile, lowest)
        seen_tiles = -(-listed // pages_per_tile)
        tiles = [by_all // pages_per_tile, seen_tiles, seen_tiles]
    else:
        owner = step.page_branch[blocks.row]  # [B, P]
        first_slot = jnp.arange(owner.shape[1], dtype=jnp.int32) * page_size
        bound = jnp.where(owner[:, None] == branch[:, :, None], own_bound[:, :, None], trunk_bound[:, :, None])
        context_end = jnp.max(bound, axis=1)  # [B, P]
        seen_by_all = jnp.min(jnp.where(idle[:, :, None], _NEVER, bound), axis=1)
        is_full, is_seen = seen_by_all >= first_slot + page_size, context_end > first_slot
        if first is not None:
            is_full &= jnp.max(jnp.where(idle, 0, first), axis=1)[:, None] <= first_slot
            is_seen &= jnp.min(first, axis=1)[:, None] < first_slot + page_size
        section = jnp.where(is_seen, jnp.where(is_full, _FULL, _CONTEXT), _UNSEEN)
        if bits is not None:
            union = jax.lax.reduce(bits, jnp.uint32(0), jax.lax.bitwise_or, (1,))
            has_bits = _has_tail_bits(union, tail_start // page_size, owner.shape[1], page_size)
            section = jnp.where(has_bits, _TAIL, section)
            words = _stacked(jax.lax.bitcast_convert_type(bits, jnp.int32), group, tuning)
            block_words = jax.lax.bitcast_convert_type(union, jnp.int32)
        counts = [jnp.sum(section <= last, axis=1) for last in (_FULL, _CONTEXT, _TAIL)]
        tiles = [counts[0] // pages_per_tile, counts[1] // pages_per_tile, -(-counts[2] // pages_per_tile)]
        if not tail_words:
            tiles[1] = tiles[2]
        pages = _page_list(table, owner, context_end, section, pages_per_tile)
    fields = [blocks.first_token, blocks.num_tokens, *tiles, tail_start, tail_start // page_size]
    of_queries = [own_bound, trunk_bound, branch]
    if first is not None:
        fields.append(jnp.min(first, axis=1))
        of_queries.append(first)
    return BlockPlan(
        header=jnp.stack([field.astype(jnp.int32) for field in fields], axis=1),
        pages=pages,
        queries=_stacked(jnp.stack(of_queries, axis=-1), group, tuning),
        tail_bits=words,
        block_tail_bits=block_words,
    )


def block_of_tokens(blocks: QueryBlocks, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the block of each token and its place in the block, int32 [T] each."""
    block = jnp.searchsorted(blocks.first_token, tokens, side="right", method="compare_all").astype(jnp.int32) - 1
    return block, tokens - blocks.first_token[block]


def _page_list(
    table: jax.Array, owner: jax.Array, context_end: jax.Array, section: jax.Array, pages_per_tile: int
) -> jax.Array:
    """List the pages that a block sees, int32 [B, 4, L], by section, then in lane order, padded to whole tiles."""
    num_pages = table.shape[1]
    order = jnp.argsort(section, axis=1, stable=True).astype(jnp.int32)
    order = jnp.pad(order, ((0, 0), (0, -num_pages % pages_per_tile)), mode="edge")
    entry = jnp.arange(order.shape[1], dtype=jnp.int32)
    seen = jnp.sum(section != _UNSEEN, axis=1)[:, None]
    # Padding of the last tile is loaded too: a page that the block has just read costs least.
    at = jnp.take_along_axis(order, jnp.clip(jnp.minimum(entry, seen - 1), 0), axis=1)
    listed = entry < seen
    columns = [
        jnp.take_along_axis(table, at, axis=1),
        jnp.where(listed, at, num_pages),
        jnp.take_along_axis(owner, at, axis=1),
        jnp.where(listed, jnp.take_along_axis(context_end, at, axis=1), 0),
    ]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _pages_in_order(
    table: jax.Array,
    seen: jax.Array,
    last: jax.Array,
    pages_per_tile: int,
    lowest: tuple[jax.Array, jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the `_page_list` of rows without branches and tails, and its length [B], without sorting.

    Args:
        seen, last: int32 [B], the pages of a block and its lane indices end before these.
        lowest: int32 [B] each, the first page that some queries see, the first whose first slot all see, and the number
            of pages from that one on which all see whole; these come first. None: all see all pages from their first
            slots.
    """
    num_pages = table.shape[1]
    latest = table[jnp.arange(table.shape[0]), jnp.maximum(seen - 1, 0)]
    table = jnp.pad(table, ((0, 0), (0, -num_pages % pages_per_tile)))
    entry = jnp.arange(table.shape[1], dtype=jnp.int32)
    if lowest is None:
        count, at = seen, entry
    else:
        count, (least, whole, full) = seen - lowest[0], (x[:, None] for x in lowest)
        at = jnp.where(entry < full, entry + whole, entry + least - jnp.where(entry < full + whole - least, full, 0))
        table = jnp.take_along_axis(table, jnp.clip(at, 0, num_pages - 1), axis=1)
    listed = entry < count[:, None]
    columns = [
        jnp.where(listed, table, latest[:, None]),
        jnp.where(listed, at, num_pages),
        jnp.full_like(table, -1),
        jnp.where(listed, last[:, None], 0),
    ]
    return jnp.stack(columns, axis=1).astype(jnp.int32), count


def _stacked(values: jax.Array, group: int, tuning: Tuning) -> jax.Array:
    """Map [B, N, X] per token to [B, C, X, QUERY_ROWS] per stacked query row; rows without a token hold zeros."""
    per_consumer = tuning.tokens_per_consumer(group)
    values = values.reshape(values.shape[0], tuning.consumers, per_consumer, values.shape[-1])
    values = jnp.repeat(values.swapaxes(2, 3), group, axis=-1)
    return jnp.pad(values, [(0, 0)] * 3 + [(0, QUERY_ROWS - per_consumer * group)])


def _aligned(bits: jax.Array, shift: jax.Array) -> jax.Array:
    """Shift bits uint32 [B, N, W] up by `shift` [B] (less than two words); zeros follow."""
    words = aligned_tail_words(bits.shape[-1])
    padded = jnp.pad(bits, ((0, 0), (0, 0), (2, words - bits.shape[-1])))
    index = jnp.arange(words) + 2 - shift[:, None] // _WORD  # [B, words]
    low, high = (jnp.take_along_axis(padded, (index - back)[:, None], axis=-1) for back in (0, 1))
    by = (shift % _WORD).astype(jnp.uint32)[:, None, None]
    # A shift by a whole word is undefined.
    carried = jnp.where(by == 0, jnp.uint32(0), high >> ((_WORD - by) % _WORD))
    return (low << by) | carried


def _has_tail_bits(union: jax.Array, tail_page: jax.Array, num_pages: int, page_size: int) -> jax.Array:
    """Return bool [B, P]: whether any of the block's tail bits is in the page."""
    bits = (union[:, :, None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    bits = bits.reshape(union.shape[0], -1)
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % page_size))).reshape(union.shape[0], -1, page_size)
    in_page = jnp.any(bits == 1, axis=-1)
    relative = jnp.arange(num_pages, dtype=jnp.int32) - tail_page[:, None]
    inside = (relative >= 0) & (relative < in_page.shape[1])
    return inside & jnp.take_along_axis(in_page, jnp.clip(relative, 0, in_page.shape[1] - 1), axis=1)

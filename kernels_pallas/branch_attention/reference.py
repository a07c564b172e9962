"""The same attention in plain XLA: the truth for the kernel, and what runs where no kernel does.

Queries of one row that walk over KV together are a tile: a decode row's, or a block of a prefill row's. Tiles see their
rows' lanes in chunks, and what they have of each chunk is merged by its log-sum-exp. Decode rows hand out their chunks
as one list of work, so that rows of very different lengths cost no more than their sum. All trip counts are computed
on the device: the work is that of the tokens that are there, whatever the padded shapes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.branch_attention.blocks import StepIntegers
from kernels_pallas.visibility import visible

PREFILL_BLOCK = 64
CHUNK_TOKENS = 128
# So many chunks of decode rows at once; K and V of more would not stay in a CPU's caches.
DECODE_ITEMS = 8
# Up to so many queries of a row and KV head, one product for all heads is faster than one for each.
FEW_QUERIES = 8
_LOWEST = -1e30
_Score = Callable[[jax.Array], jax.Array]
_Weigh = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tiles:
    """Queries that walk over KV together: N tiles of B queries each."""

    q: jax.Array  # [N, B, Hkv, G, D], scaled
    row: jax.Array  # int32 [N]
    limit: jax.Array  # int32 [N, B]
    branch: jax.Array  # int32 [N, B]
    tail_bits: jax.Array  # uint32 [N, B, W]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Partial:
    """Attention over some of the lane, to be merged with the rest: softmax relative to `top`. Q = B * G queries."""

    acc: jax.Array  # float32 [N, Hkv, Q, D], weighted sum of V
    top: jax.Array  # float32 [N, Hkv, Q], greatest score
    total: jax.Array  # float32 [N, Hkv, Q], sum of the weights

    @classmethod
    def nothing(cls, tiles: int, kv_heads: int, queries: int, head_dim: int) -> _Partial:
        acc = jnp.zeros((tiles, kv_heads, queries, head_dim), jnp.float32)
        return cls(acc, jnp.full(acc.shape[:-1], _LOWEST, jnp.float32), jnp.zeros(acc.shape[:-1], jnp.float32))

    def scaled_to(self, top: jax.Array) -> _Partial:
        factor = jnp.exp(self.top - top)
        return _Partial(self.acc * factor[..., None], top, self.total * factor)

    def result(self, width: int) -> jax.Array:
        """float32 [N, B, Hkv, G, D]; zeros for queries that saw nothing."""
        out = self.acc / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)[..., None]
        tiles, kv_heads, queries, head_dim = out.shape
        return out.reshape(tiles, kv_heads, width, queries // width, head_dim).transpose(0, 2, 1, 3, 4)


def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, step: StepIntegers, *, scale: float
) -> jax.Array:
    """Attention of a step's tokens over the pool, by the visibility rule, in any dtype: see `api.branch_attention`."""
    tokens, num_heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(tokens, kv_heads, num_heads // kv_heads, head_dim)
    decode_tokens = step.decode_rows * step.decode_width
    parts = []
    if decode_tokens:
        parts.append(_decode_group(grouped[:decode_tokens], k_pages, v_pages, step))
    if tokens > decode_tokens:
        parts.append(_prefill_group(grouped[decode_tokens:], k_pages, v_pages, step))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.reshape(tokens, num_heads, head_dim).astype(q.dtype)


def _decode_group(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, step: StepIntegers) -> jax.Array:
    """q [decode_rows * decode_width, Hkv, G, D] -> float32 of the same shape."""
    rows, width = step.decode_rows, step.decode_width
    tokens, kv_heads, group, head_dim = q.shape

    def by_row(x: jax.Array) -> jax.Array:
        return x[:tokens].reshape(rows, width, *x.shape[1:])

    tiles = _Tiles(by_row(q), jnp.arange(rows), by_row(step.limit), by_row(step.branch), by_row(step.tail_bits))
    # A row that sees nothing has one chunk, so that the rows of successive items are successive; rows after the last
    # one that sees something have none.
    chunks = _num_chunks(_ends(tiles, step), k_pages)
    last_row = jnp.max(jnp.where(chunks > 0, jnp.arange(rows), 0))
    chunks = jnp.where(jnp.arange(rows) <= last_row, jnp.maximum(chunks, 1), 0)
    done = jnp.cumsum(chunks)
    count = min(DECODE_ITEMS, rows)

    def one_round(number: jax.Array, state: _Partial) -> _Partial:
        item = number * count + jnp.arange(count)
        row = jnp.minimum(jnp.sum(item[:, None] >= done, axis=1), last_row)
        chunk = jnp.where(item < done[-1], item - (done - chunks)[row], jnp.int32(-1))
        found = _attend_chunk(jax.tree.map(lambda x: x[row], tiles), chunk, k_pages, v_pages, step)
        # The rows of the items, and maybe some after them.
        own = row - row[0] == jnp.arange(count)[:, None]
        before = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row[0], count), state)
        top = jnp.maximum(before.top, jnp.max(jnp.where(own[..., None, None], found.top, _LOWEST), axis=1))
        before, found = before.scaled_to(top), found.scaled_to(top[row - row[0]])
        merged = _Partial(
            before.acc + jnp.einsum("ri,ihqd->rhqd", own.astype(jnp.float32), found.acc),
            top,
            before.total + jnp.sum(jnp.where(own[..., None, None], found.total, 0.0), axis=1),
        )
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, row[0], axis=0), state, merged)

    state = _Partial.nothing(rows + count, kv_heads, width * group, head_dim)
    state = lax.fori_loop(0, (done[-1] + count - 1) // count, one_round, state)
    return jax.tree.map(lambda x: x[:rows], state).result(width).reshape(q.shape)


def _prefill_group(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, step: StepIntegers) -> jax.Array:
    """q [T - decode tokens, Hkv, G, D] of packed prefill rows -> float32 of the same shape."""
    first = step.decode_rows * step.decode_width
    tokens = q.shape[0]
    # Blocks are cut with fixed size from packed tokens: room for the last one to reach beyond the end.
    pad = PREFILL_BLOCK

    def packed(x: jax.Array) -> jax.Array:
        return jnp.pad(x[first:], [(0, pad)] + [(0, 0)] * (x.ndim - 1))

    q = jnp.pad(q, [(0, pad), (0, 0), (0, 0), (0, 0)])
    limit, branch, tail_bits = packed(step.limit), packed(step.branch), packed(step.tail_bits)
    starts = step.query_start_loc[step.decode_rows :] - first
    block_ends = jnp.cumsum((jnp.diff(starts) + PREFILL_BLOCK - 1) // PREFILL_BLOCK)

    def one_block(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
        in_row = index - jnp.where(row > 0, block_ends[jnp.maximum(row - 1, 0)], 0)
        start = starts[row] + in_row * PREFILL_BLOCK

        def cut(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, PREFILL_BLOCK)[None]

        own = start + jnp.arange(PREFILL_BLOCK) < starts[row + 1]
        tile = _Tiles(
            q=cut(q),
            row=(row + step.decode_rows)[None],
            limit=jnp.where(own, cut(limit), -1),
            branch=cut(branch),
            tail_bits=jnp.where(own[None, :, None], cut(tail_bits), jnp.uint32(0)),
        )

        def one_chunk(chunk: jax.Array, before: _Partial) -> _Partial:
            found = _attend_chunk(tile, chunk[None], k_pages, v_pages, step)
            top = jnp.maximum(before.top, found.top)
            before, found = before.scaled_to(top), found.scaled_to(top)
            return _Partial(before.acc + found.acc, top, before.total + found.total)

        [num_chunks] = _num_chunks(_ends(tile, step), k_pages)
        nothing = _Partial.nothing(1, q.shape[1], PREFILL_BLOCK * q.shape[2], q.shape[3])
        result = lax.fori_loop(0, num_chunks, one_chunk, nothing).result(PREFILL_BLOCK)[0]
        # What a block writes beyond its row's end is overwritten by the next row's block, or is padding.
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = lax.fori_loop(0, block_ends[-1], one_block, jnp.zeros(q.shape, jnp.float32))
    # A row's end in the padded area: tokens after the last row must not keep a block's overhang.
    is_token = jnp.arange(tokens) < starts[-1]
    return jnp.where(is_token[:, None, None, None], out[:tokens], 0.0)


def _ends(tiles: _Tiles, step: StepIntegers) -> jax.Array:
    """int32 [N]: lane indices from here on are seen by no query of the tile."""
    ends = jnp.max(tiles.limit, axis=1) + 1
    if tiles.tail_bits.shape[-1]:
        in_tail = jnp.any(tiles.tail_bits != 0, axis=(1, 2))
        ends = jnp.maximum(ends, jnp.where(in_tail, step.kv_len[tiles.row], 0))
    return ends


def _num_chunks(ends: jax.Array, k_pages: jax.Array) -> jax.Array:
    size = _pages_per_chunk(k_pages) * k_pages.shape[1]
    return (ends + size - 1) // size


def _pages_per_chunk(k_pages: jax.Array) -> int:
    return max(1, CHUNK_TOKENS // k_pages.shape[1])


def _attend_chunk(
    tiles: _Tiles, chunk: jax.Array, k_pages: jax.Array, v_pages: jax.Array, step: StepIntegers
) -> _Partial:
    """Attention of each tile's queries over one chunk of their row's lane; a chunk of -1 is empty."""
    count, width, kv_heads, group, head_dim = tiles.q.shape
    page_size, num_pages = k_pages.shape[1], _pages_per_chunk(k_pages)
    size = num_pages * page_size
    # Beyond the table's end nothing is seen, whatever page stands there.
    at = (tiles.row[:, None], chunk[:, None] * num_pages + jnp.arange(num_pages))
    table, owner = (x.at[at].get(mode="clip") for x in (step.page_table, step.page_branch))
    trunk_len, tail_start = step.trunk_len[tiles.row], step.tail_start[tiles.row]
    index = chunk[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    seen = (index >= 0)[:, None] & visible(
        index[:, None],
        limit=tiles.limit[:, :, None],
        branch=tiles.branch[:, :, None],
        tail_bits=tiles.tail_bits[:, :, None],
        trunk_len=trunk_len[:, None, None],
        tail_start=tail_start[:, None, None],
        index_branch=jnp.repeat(owner, page_size, axis=1)[:, None],
    )  # [N, B, size]
    k = k_pages[table].reshape(count, size, kv_heads, head_dim)
    v = v_pages[table].reshape(count, size, kv_heads, head_dim)
    # Slots that no query sees may hold anything, and 0 * NaN is NaN.
    v = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], v, jnp.zeros((), v.dtype))
    queries = tiles.q.transpose(0, 2, 1, 3, 4).reshape(count, kv_heads, width * group, head_dim)
    products = _products_of_all_heads if width * group <= FEW_QUERIES else _products_by_head
    score, weigh = products(queries)
    scores = score(k)
    mask = jnp.broadcast_to(seen[:, None, :, None], (count, kv_heads, width, group, size)).reshape(scores.shape)
    scores = jnp.where(mask, scores, _LOWEST)
    top = jnp.max(scores, axis=-1)
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    return _Partial(weigh(weights.astype(v.dtype), v), top, jnp.sum(weights, axis=-1))


def _products_by_head(queries: jax.Array) -> tuple[_Score, _Weigh]:
    """The two products of attention, a matrix product for every row and head.

    Args:
        queries: [N, Hkv, Q, D].

    Returns:
        k [N, C, Hkv, D] -> scores float32 [N, Hkv, Q, C]; weights [N, Hkv, Q, C], v -> float32 [N, Hkv, Q, D].
    """

    def score(k: jax.Array) -> jax.Array:
        return jnp.einsum("nhqd,nchd->nhqc", queries, k, preferred_element_type=jnp.float32)

    def weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("nhqc,nchd->nhqd", weights, v, preferred_element_type=jnp.float32)

    return score, weigh


def _products_of_all_heads(queries: jax.Array) -> tuple[_Score, _Weigh]:
    """The same with one matrix product for every row, in which each head's queries are zero for the other heads.

    That is Hkv times the multiplications, and less work where queries are few: K and V are read as they lie, without
    transposing them, and on a CPU a small product costs less than its call.
    """
    rows, heads, count, dim = queries.shape
    own = jnp.eye(heads, dtype=queries.dtype)
    spread = jnp.einsum("nhqd,hj->njdhq", queries, own).reshape(rows, heads * dim, heads * count)

    def score(k: jax.Array) -> jax.Array:
        scores = jnp.matmul(k.reshape(rows, -1, heads * dim), spread, preferred_element_type=jnp.float32)
        return scores.reshape(rows, -1, heads, count).transpose(0, 2, 3, 1)

    def weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
        flat = weights.reshape(rows, heads * count, -1)
        values = jnp.matmul(flat, v.reshape(rows, -1, heads * dim), preferred_element_type=jnp.float32)
        values = values.reshape(rows, heads, count, heads, dim)
        return jnp.stack([values[:, head, :, head] for head in range(heads)], axis=1)

    return score, weigh

"""Paged attention in plain XLA: the reference for every kernel, and the backend where no kernel runs.

Queries are taken in tiles (several decode rows, or one block of a prefill row); a tile walks over its rows' pages in
chunks with a running softmax. Both loops have trip counts that are computed on the device, so the work is that of the
tokens that are there, whatever the padded shapes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.attention.metadata import AttentionMetadata
from jaxinfer.attention.visibility import visible

DECODE_TILE_ROWS = 16
PREFILL_BLOCK = 64
CHUNK_TOKENS = 128
# Up to so many queries of a row and KV head, one product for all heads is faster than one for each.
FEW_QUERIES = 8
_LOWEST = -1e30
_Score = Callable[[jax.Array], jax.Array]
_Weigh = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tile:
    """Queries that walk over KV together: N rows of B queries each."""

    q: jax.Array  # [N, B, Hkv, G, D], scaled
    row: jax.Array  # int32 [N]
    limit: jax.Array  # int32 [N, B]
    branch: jax.Array  # int32 [N, B]
    tail_bits: jax.Array  # uint32 [N, B, W]


def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, metadata: AttentionMetadata, *, scale: float
) -> jax.Array:
    """Attention of a step's tokens over the pool, by the visibility rule.

    Args:
        q: [T, num_heads, head_dim].
        k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim], this step's tokens already written.
        metadata: see `AttentionMetadata`.
        scale: factor of the scores, usually head_dim ** -0.5.

    Returns:
        [T, num_heads, head_dim] in q's dtype; zeros for tokens that see nothing.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    grouped = (q * jnp.asarray(scale, q.dtype)).reshape(tokens, kv_heads, num_heads // kv_heads, head_dim)
    decode_tokens = metadata.decode_rows * metadata.decode_width
    parts = []
    if decode_tokens:
        parts.append(_decode_group(grouped[:decode_tokens], k_pages, v_pages, metadata))
    if tokens > decode_tokens:
        parts.append(_prefill_group(grouped[decode_tokens:], k_pages, v_pages, metadata))
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.reshape(tokens, num_heads, head_dim).astype(q.dtype)


def _decode_group(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, metadata: AttentionMetadata) -> jax.Array:
    """q [decode_rows * decode_width, Hkv, G, D] -> float32 of the same shape."""
    rows, width = metadata.decode_rows, metadata.decode_width
    tokens = rows * width
    tile_rows = min(rows, DECODE_TILE_ROWS)
    padded = -(-rows // tile_rows) * tile_rows

    def by_row(x: jax.Array, fill: int = 0) -> jax.Array:
        x = x[:tokens].reshape(rows, width, *x.shape[1:])
        return jnp.pad(x, [(0, padded - rows)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

    tiles = _Tile(
        q=by_row(q),
        row=jnp.pad(jnp.arange(rows, dtype=jnp.int32), (0, padded - rows)),
        limit=by_row(metadata.limit, fill=-1),
        branch=by_row(metadata.branch),
        tail_bits=by_row(metadata.tail_bits),
    )
    if padded == tile_rows:
        return _attend_tile(tiles, k_pages, v_pages, metadata).reshape(padded * width, *q.shape[1:])[:tokens]
    # Padding rows come last and have kv_len 0: tiles of padding alone are not visited.
    last_row = jnp.max(jnp.where(metadata.kv_len[:rows] > 0, jnp.arange(1, rows + 1), 0))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * tile_rows, tile_rows), tiles)
        result = _attend_tile(tile, k_pages, v_pages, metadata)
        return lax.dynamic_update_slice_in_dim(out, result, index * tile_rows, axis=0)

    out = jnp.zeros(tiles.q.shape, jnp.float32)
    out = lax.fori_loop(0, (last_row + tile_rows - 1) // tile_rows, one_tile, out)
    return out.reshape(padded * width, *q.shape[1:])[:tokens]


def _prefill_group(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, metadata: AttentionMetadata) -> jax.Array:
    """q [T - decode tokens, Hkv, G, D] of packed prefill rows -> float32 of the same shape."""
    first = metadata.decode_rows * metadata.decode_width
    tokens = q.shape[0]
    # Blocks are cut with fixed size from packed tokens: room for the last one to reach beyond the end.
    pad = PREFILL_BLOCK

    def packed(x: jax.Array) -> jax.Array:
        return jnp.pad(x[first:], [(0, pad)] + [(0, 0)] * (x.ndim - 1))

    q = jnp.pad(q, [(0, pad), (0, 0), (0, 0), (0, 0)])
    limit, branch, tail_bits = packed(metadata.limit), packed(metadata.branch), packed(metadata.tail_bits)
    starts = metadata.query_start_loc[metadata.decode_rows :] - first
    block_ends = jnp.cumsum((jnp.diff(starts) + PREFILL_BLOCK - 1) // PREFILL_BLOCK)

    def one_block(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
        in_row = index - jnp.where(row > 0, block_ends[jnp.maximum(row - 1, 0)], 0)
        start = starts[row] + in_row * PREFILL_BLOCK

        def cut(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, PREFILL_BLOCK)[None]

        own = start + jnp.arange(PREFILL_BLOCK) < starts[row + 1]
        tile = _Tile(
            q=cut(q),
            row=(row + metadata.decode_rows)[None],
            limit=jnp.where(own, cut(limit), -1),
            branch=cut(branch),
            tail_bits=jnp.where(own[None, :, None], cut(tail_bits), jnp.uint32(0)),
        )
        result = _attend_tile(tile, k_pages, v_pages, metadata)[0]
        # What a block writes beyond its row's end is overwritten by the next row's block, or is padding.
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = lax.fori_loop(0, block_ends[-1], one_block, jnp.zeros(q.shape, jnp.float32))
    # A row's end in the padded area: tokens after the last row must not keep a block's overhang.
    is_token = jnp.arange(tokens) < starts[-1]
    return jnp.where(is_token[:, None, None, None], out[:tokens], 0.0)


def _attend_tile(tile: _Tile, k_pages: jax.Array, v_pages: jax.Array, metadata: AttentionMetadata) -> jax.Array:
    """float32 [N, B, Hkv, G, D]: softmax attention of the tile's queries over their rows' lanes."""
    rows, width, kv_heads, group, head_dim = tile.q.shape
    page_size = k_pages.shape[1]
    chunk_pages = max(1, CHUNK_TOKENS // page_size)
    chunk = chunk_pages * page_size
    pages = metadata.page_table.shape[1]
    pad = -pages % chunk_pages
    page_table = jnp.pad(metadata.page_table, ((0, 0), (0, pad)))[tile.row]
    page_branch = jnp.pad(metadata.page_branch, ((0, 0), (0, pad)))[tile.row]
    kv_len, trunk_len, tail_start = (x[tile.row] for x in (metadata.kv_len, metadata.trunk_len, metadata.tail_start))
    ends = jnp.max(tile.limit, axis=1) + 1
    if tile.tail_bits.shape[-1]:
        ends = jnp.maximum(ends, jnp.where(jnp.any(tile.tail_bits != 0, axis=(1, 2)), kv_len, 0))
    queries = tile.q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, width * group, head_dim)
    products = _products_of_all_heads if width * group <= FEW_QUERIES else _products_by_head
    score, weigh = products(queries)

    def one_chunk(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total = carry
        table = lax.dynamic_slice_in_dim(page_table, index * chunk_pages, chunk_pages, axis=1)
        owner = lax.dynamic_slice_in_dim(page_branch, index * chunk_pages, chunk_pages, axis=1)
        seen = visible(
            index * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, None],
            limit=tile.limit[:, :, None],
            branch=tile.branch[:, :, None],
            tail_bits=tile.tail_bits[:, :, None],
            trunk_len=trunk_len[:, None, None],
            tail_start=tail_start[:, None, None],
            index_branch=jnp.repeat(owner, page_size, axis=1)[:, None],
        )  # [N, B, chunk]
        k = k_pages[table].reshape(rows, chunk, kv_heads, head_dim)
        v = v_pages[table].reshape(rows, chunk, kv_heads, head_dim)
        # Slots that no query sees may hold anything, and 0 * NaN is NaN.
        v = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], v, jnp.zeros((), v.dtype))
        scores = score(k)
        mask = jnp.broadcast_to(seen[:, None, :, None], (rows, kv_heads, width, group, chunk)).reshape(scores.shape)
        scores = jnp.where(mask, scores, _LOWEST)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        return (
            acc * shrink[..., None] + weigh(weights.astype(v.dtype), v),
            new_top,
            total * shrink + jnp.sum(weights, axis=-1),
        )

    acc = jnp.zeros((rows, kv_heads, width * group, head_dim), jnp.float32)
    top = jnp.full(acc.shape[:-1], _LOWEST, jnp.float32)
    acc, _, total = lax.fori_loop(
        0, (jnp.max(ends) + chunk - 1) // chunk, one_chunk, (acc, top, jnp.zeros(top.shape, jnp.float32))
    )
    out = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.reshape(rows, kv_heads, width, group, head_dim).transpose(0, 2, 1, 3, 4)


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


def rotate_and_write(
    heads: ProjectedHeads, k_pages: jax.Array, v_pages: jax.Array, slot_mapping: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries ready for attention, and the pages with the heads' keys and values at the slots."""
    q, k, v = heads.rotated()
    return q, write_kv(k_pages, k, slot_mapping), write_kv(v_pages, v, slot_mapping)


def write_kv(pages: jax.Array, new: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """pages [num_pages, page_size, Hkv, D] with new [T, Hkv, D] at the slots; slots out of range are dropped."""
    flat = pages.reshape(-1, *pages.shape[2:])
    new = new.astype(pages.dtype)
    if new.shape[0] > 1:
        flat = flat.at[slot_mapping].set(new, mode="drop", unique_indices=True)
    else:
        # A scatter of one token is no loop on a CPU, and there XLA copies the whole pool before it: so write a loop.
        count = (slot_mapping[0] < flat.shape[0]).astype(jnp.int32)
        flat = lax.fori_loop(0, count, lambda _, x: lax.dynamic_update_slice_in_dim(x, new, slot_mapping[0], 0), flat)
    return flat.reshape(pages.shape)

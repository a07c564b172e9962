"""Branch attention in plain XLA: the kernel's reference, and the fallback where the kernel cannot run.

A tile is a decode row's tokens, or a block of a prefill row's tokens; they read KV together. A tile reads its row's
lane in chunks, and the chunks' partial results are merged by log-sum-exp. The chunks of all tiles are one list of work
items, so that the cost is their sum even if tiles have very different numbers of chunks. All trip counts are computed
on the device: the work depends on the actual tokens, not on the padded shapes. Tiles and their chunks are the plan,
which all layers of a step share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.branch_attention.blocks import (
    AttentionSizes,
    QueryBlocks,
    StepIntegers,
    block_of_tokens,
    decode_blocks,
    prefill_blocks,
)
from kernels_pallas.visibility import visible

PREFILL_BLOCK = 64
CHUNK_TOKENS = 128
# Chunks computed at once, of decode rows and of prefill blocks; K and V of more would not fit a CPU's caches.
DECODE_ITEMS = 8
PREFILL_ITEMS = 4
# Up to this many queries of a row and KV head, one product for all heads is faster than one for each.
FEW_QUERIES = 8
_LOWEST = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tiles:
    """N tiles of up to `width` tokens, of decode rows or of prefill rows, and the number of chunks that each reads."""

    row: jax.Array  # int32 [N]
    tokens: jax.Array  # int32 [N, width], -1 where there is none
    begin: jax.Array | None  # int32 [N], the first chunk that is read; None: the lane's first
    chunks: jax.Array  # int32 [N]
    done: jax.Array  # int32 [N], cumulative sum of `chunks`
    last: jax.Array  # int32 [], the last tile that sees something
    # int32 [T] each: the tile of each prefill token and its place in it. None for decode rows, which fill their tiles.
    places: tuple[jax.Array, jax.Array] | None
    items: int = field(metadata={"static": True})  # chunks that are computed together


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Integers:
    """Integers of a step that determine what its tokens see; shapes as in `StepIntegers`."""

    limit: jax.Array
    first: jax.Array
    branch: jax.Array
    tail_bits: jax.Array
    page_table: jax.Array
    page_branch: jax.Array
    trunk_len: jax.Array
    tail_start: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedPlan:
    """Plan that all layers of a step share. Tiles of decode rows come first; a kind without rows is absent."""

    tiles: tuple[_Tiles, ...]
    step: _Integers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Partial:
    """Attention over part of a lane, to be merged with the rest: softmax relative to `top`. Q = width * G queries."""

    acc: jax.Array  # float32 [N, Hkv, Q, D], weighted sum of V
    top: jax.Array  # float32 [N, Hkv, Q], maximum score
    total: jax.Array  # float32 [N, Hkv, Q], sum of the weights

    @classmethod
    def nothing(cls, tiles: int, width: int, q: jax.Array, sinks: jax.Array | None) -> _Partial:
        """Nothing seen yet, by queries like q [..., Hkv, G, D]; a sink is a score without a value, which all see."""
        kv_heads, group, head_dim = q.shape[-3:]
        acc = jnp.zeros((tiles, kv_heads, width * group, head_dim), jnp.float32)
        if sinks is None:
            return cls(acc, jnp.full(acc.shape[:-1], _LOWEST, jnp.float32), jnp.zeros(acc.shape[:-1], jnp.float32))
        top = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, width))
        return cls(acc, jnp.broadcast_to(top, acc.shape[:-1]), jnp.ones(acc.shape[:-1], jnp.float32))

    def scaled_to(self, top: jax.Array) -> _Partial:
        factor = jnp.exp(self.top - top)
        return _Partial(self.acc * factor[..., None], top, self.total * factor)

    def result(self, width: int) -> jax.Array:
        """Return the normalised result float32 [N, width, Hkv, G, D]; zeros for queries that saw nothing."""
        out = self.acc / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)[..., None]
        tiles, kv_heads, queries, head_dim = out.shape
        return out.reshape(tiles, kv_heads, width, queries // width, head_dim).transpose(0, 2, 1, 3, 4)


def plan_paged_attention(step: StepIntegers, sizes: AttentionSizes) -> PagedPlan:
    """Plan the tiles of a step and their chunks; see `api.plan_branch_attention`."""
    decode_tokens, tokens = step.decode_rows * step.decode_width, step.limit.shape[0]
    tiles = []
    if decode_tokens:
        blocks = decode_blocks(step, step.decode_width)
        tiles.append(_plan_tiles(blocks, None, step, sizes, width=step.decode_width, items=DECODE_ITEMS))
    if tokens > decode_tokens:
        width = min(PREFILL_BLOCK, tokens - decode_tokens)
        blocks = prefill_blocks(step, width)
        places = block_of_tokens(blocks, jnp.arange(decode_tokens, tokens))
        tiles.append(_plan_tiles(blocks, places, step, sizes, width=width, items=PREFILL_ITEMS))
    return PagedPlan(tuple(tiles), _Integers(**{f.name: getattr(step, f.name) for f in fields(_Integers)}))


def _plan_tiles(
    blocks: QueryBlocks,
    places: tuple[jax.Array, jax.Array] | None,
    step: StepIntegers,
    sizes: AttentionSizes,
    *,
    width: int,
    items: int,
) -> _Tiles:
    """Return the blocks as tiles of up to `width` tokens."""
    num_tiles = blocks.row.shape[0]
    index = jnp.arange(width)
    tokens = jnp.where(index < blocks.num_tokens[:, None], blocks.first_token[:, None] + index, -1)
    # A tile that sees nothing has one chunk, so that consecutive items are of the same or consecutive tiles; tiles
    # after the last one that sees something have none.
    size = _pages_per_chunk(sizes.page_size) * sizes.page_size
    chunks = (_ends(blocks.row, tokens, step) + size - 1) // size
    begin = jnp.minimum(_begins(blocks.row, tokens, step) // size, chunks) if step.first.shape[0] else None
    chunks = chunks if begin is None else chunks - begin
    last = jnp.max(jnp.where(chunks > 0, jnp.arange(num_tiles), -1))
    chunks = jnp.where(jnp.arange(num_tiles) <= last, jnp.maximum(chunks, 1), 0)
    return _Tiles(blocks.row, tokens, begin, chunks, jnp.cumsum(chunks), last, places, min(items, num_tiles))


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: PagedPlan,
    *,
    scale: float,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute attention of a step's tokens over the pool by the visibility rule, in any dtype: see `api`."""
    tokens, num_heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)  # the factor itself is not rounded
    grouped = scaled.reshape(tokens, kv_heads, num_heads // kv_heads, head_dim)
    parts = []
    for tiles in plan.tiles:
        found = _attend_tiles(tiles, grouped, k_pages, v_pages, plan.step, cap, sinks)
        parts.append(found.reshape(-1, *grouped.shape[1:]) if tiles.places is None else found[tiles.places])
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.reshape(tokens, num_heads, head_dim).astype(q.dtype)


def _attend_tiles(
    tiles: _Tiles,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    step: _Integers,
    cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Map scaled q [T, Hkv, G, D] to float32 [N, width, Hkv, G, D]; zeros for tokens that saw nothing."""
    num_tiles, width = tiles.tokens.shape
    count, done = tiles.items, tiles.done

    def one_round(number: jax.Array, state: _Partial) -> _Partial:
        item = number * count + jnp.arange(count)
        tile = jnp.minimum(jnp.sum(item[:, None] >= done, axis=1), tiles.last)
        begin = (0 if tiles.begin is None else tiles.begin) - (done - tiles.chunks)
        chunk = jnp.where(item < done[-1], item + begin[tile], jnp.int32(-1))
        found = _attend_chunk(tiles.row[tile], tiles.tokens[tile], chunk, q, k_pages, v_pages, step, cap)
        # own[r, i]: whether item i is of tile tile[0] + r; later ones of these tiles may have no item.
        own = tile - tile[0] == jnp.arange(count)[:, None]
        before = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile[0], count), state)
        top = jnp.maximum(before.top, jnp.max(jnp.where(own[..., None, None], found.top, _LOWEST), axis=1))
        before, found = before.scaled_to(top), found.scaled_to(top[tile - tile[0]])
        merged = _Partial(
            before.acc + jnp.einsum("ri,ihqd->rhqd", own.astype(jnp.float32), found.acc),
            top,
            before.total + jnp.sum(jnp.where(own[..., None, None], found.total, 0.0), axis=1),
        )
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, tile[0], axis=0), state, merged)

    def nothing() -> _Partial:
        return _Partial.nothing(num_tiles + count, width, q, sinks)

    def all_rounds() -> _Partial:
        return lax.fori_loop(0, (done[-1] + count - 1) // count, one_round, nothing())

    # In a conditional, because XLA would otherwise create the empty states of all layers before the first.
    state = lax.cond(done[-1] > 0, all_rounds, nothing)
    return jax.tree.map(lambda x: x[:num_tiles], state).result(width)


def _ends(row: jax.Array, token: jax.Array, step: StepIntegers) -> jax.Array:
    """Return int32 [N]: none of a row's tokens [N, width] sees a lane index from this one on."""
    ends = jnp.max(jnp.where(token < 0, 0, step.limit[token] + 1), axis=1)
    if step.tail_bits.shape[-1]:
        in_tail = jnp.any((token >= 0) & jnp.any(step.tail_bits[token] != 0, axis=2), axis=1)
        ends = jnp.maximum(ends, jnp.where(in_tail, step.kv_len[row], 0))
    return ends


def _begins(row: jax.Array, token: jax.Array, step: StepIntegers) -> jax.Array:
    """Return int32 [N]: none of a row's tokens [N, width] sees a lane index before this one."""
    first, sees = step.first[token], step.limit[token] >= 0
    if step.tail_bits.shape[-1]:
        sees |= jnp.any(step.tail_bits[token] != 0, axis=2)
        first = jnp.minimum(first, step.tail_start[row][:, None])
    return jnp.min(jnp.where((token >= 0) & sees, first, jnp.iinfo(jnp.int32).max), axis=1)


def _pages_per_chunk(page_size: int) -> int:
    return max(1, CHUNK_TOKENS // page_size)


def _attend_chunk(
    row: jax.Array,
    token: jax.Array,
    chunk: jax.Array,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    step: _Integers,
    cap: float | None,
) -> _Partial:
    """Compute attention of each tile's tokens [N, width] over one chunk [N] of its row's [N] lane.

    A chunk of -1 is empty, and a token of -1 sees nothing.
    """
    count, width = token.shape
    kv_heads, group = q.shape[1:3]
    page_size = k_pages.shape[1]
    num_pages = _pages_per_chunk(page_size)
    size = num_pages * page_size
    # Beyond the table's end nothing is seen, so clipping to any page is safe.
    at = (row[:, None], chunk[:, None] * num_pages + jnp.arange(num_pages))
    table, owner = (x.at[at].get(mode="clip") for x in (step.page_table, step.page_branch))
    index = chunk[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    seen = (
        (index >= 0)[:, None]
        & (token >= 0)[:, :, None]
        & visible(
            index[:, None],
            limit=step.limit[token][:, :, None],
            branch=step.branch[token][:, :, None],
            tail_bits=step.tail_bits[token][:, :, None],
            trunk_len=step.trunk_len[row][:, None, None],
            tail_start=step.tail_start[row][:, None, None],
            index_branch=jnp.repeat(owner, page_size, axis=1)[:, None],
            first=step.first[token][:, :, None] if step.first.shape[0] else None,
        )
    )  # [N, width, size]
    k = k_pages[table].reshape(count, size, kv_heads, -1)
    v = v_pages[table].reshape(count, size, kv_heads, -1)
    # Slots that no query sees may hold anything, and 0 * NaN is NaN, in other rows too: so V is set to 0 there, and
    # where it is not finite. `rotate_and_write` makes the keys of such values NaN, so that they show in the total.
    readable = jnp.any(seen, axis=1)[:, :, None, None] & jnp.isfinite(v)
    v = jnp.where(readable, v, jnp.zeros((), v.dtype))
    few = width * group <= FEW_QUERIES
    scores = (_scores_of_all_heads if few else _scores_by_head)(q[token], k)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    mask = jnp.broadcast_to(seen[:, None, :, None], (count, kv_heads, width, group, size)).reshape(scores.shape)
    top = jnp.max(jnp.where(mask & jnp.isfinite(scores), scores, _LOWEST), axis=-1)
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    sums = (_sums_of_all_heads if few else _sums_by_head)(weights.astype(v.dtype), v)
    total = jnp.sum(weights, axis=-1)
    return _Partial(jnp.where(jnp.isfinite(total)[..., None], sums, 0.0), top, total)


def _scores_by_head(queries: jax.Array, k: jax.Array) -> jax.Array:
    """Multiply for every tile and head: [N, width, Hkv, G, D], [N, C, Hkv, D] -> float32 [N, Hkv, Q, C]."""
    count, width, kv_heads, group, dim = queries.shape
    stacked = queries.transpose(0, 2, 1, 3, 4).reshape(count, kv_heads, width * group, dim)
    return jnp.einsum("nhqd,nchd->nhqc", stacked, k, preferred_element_type=jnp.float32)


def _sums_by_head(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply for every tile and head: [N, Hkv, Q, C], [N, C, Hkv, D] -> float32 [N, Hkv, Q, D]."""
    return jnp.einsum("nhqc,nchd->nhqd", weights, v, preferred_element_type=jnp.float32)


def _scores_of_all_heads(queries: jax.Array, k: jax.Array) -> jax.Array:
    """Compute `_scores_by_head` with one matrix product per tile, in which a head's queries are 0 for other heads.

    That is Hkv times the multiplications, but less work if queries are few: K and V are read in their layout, without
    a transpose, and on a CPU a small product costs less than its call.
    """
    count, width, heads, group, dim = queries.shape
    own = jnp.eye(heads, dtype=queries.dtype)[:, None, :, None]
    spread = (queries[:, :, :, :, None] * own).reshape(count, width * heads * group, heads * dim)
    k = k.reshape(count, -1, heads * dim)
    scores = jnp.einsum("ncd,nqd->ncq", k, spread, preferred_element_type=jnp.float32)
    scores = scores.reshape(count, -1, width, heads, group).transpose(0, 3, 2, 4, 1)
    return scores.reshape(count, heads, width * group, -1)


def _sums_of_all_heads(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Compute `_sums_by_head` with one product per tile; only the part of each head with its own V is kept."""
    count, heads, queries, size = weights.shape
    flat, v = weights.reshape(count, heads * queries, size), v.reshape(count, size, -1)
    sums = jnp.matmul(flat, v, preferred_element_type=jnp.float32).reshape(count, heads, queries, heads, -1)
    return jnp.stack([sums[:, head, :, head] for head in range(heads)], axis=1)

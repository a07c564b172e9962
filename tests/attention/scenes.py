"""A step's attention inputs made of lanes, in a pool full of NaN, with the answer computed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.metadata import AttentionMetadata
from kernels_pallas.branch_attention.blocks import AttentionSizes
from tests.attention.lanes import Lane, tail_words, windowed


@dataclass(frozen=True)
class Heads:
    """Sizes and precision of one attention call."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    dtype: jnp.dtype = field(default=jnp.float32)
    cap: float | None = None
    sinks: tuple[float, ...] | None = None  # of each head


@dataclass(frozen=True)
class Scene:
    """Inputs of one attention call and what must come out of it."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    metadata: AttentionMetadata
    scale: float
    heads: Heads
    expected: np.ndarray  # float64 [T, num_heads, head_dim]
    row_of: np.ndarray  # int [T]: the row of each token, -1 for padding

    @property
    def sizes(self) -> AttentionSizes:
        return AttentionSizes.of(self.q, self.k_pages)

    def run(self, plan, attention) -> np.ndarray:
        """float32 [T, num_heads, head_dim] from a backend's two functions."""

        @jax.jit
        def attend(q, k_pages, v_pages, metadata):
            more = {"cap": self.heads.cap, "sinks": None if self.heads.sinks is None else jnp.asarray(self.heads.sinks)}
            return attention(q, k_pages, v_pages, plan(metadata, self.sizes), scale=self.scale, **more)

        out = attend(self.q, self.k_pages, self.v_pages, self.metadata)
        assert out.dtype == self.q.dtype
        return np.asarray(out.astype(jnp.float32))


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    cap: float | None = None,
    sinks: tuple[float, ...] | None = None,
) -> np.ndarray:
    """float64 [Hq, D]: one query q [Hq, D] over the tokens k, v [N, Hkv, D] that it sees, head by head."""
    group = q.shape[0] // k.shape[1]
    out = np.zeros(q.shape)
    for head in range(q.shape[0]):
        scores = k[:, head // group] @ q[head] * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        top = scores.max() if sinks is None else max(scores.max(), sinks[head])
        weights = np.exp(scores - top)
        sink = 0.0 if sinks is None else np.exp(sinks[head] - top)
        out[head] = weights / (weights.sum() + sink) @ v[:, head // group]
    return out


class _Pool:
    """K and V of all pages, NaN where nothing was written; pages are handed out in random order."""

    def __init__(self, num_pages: int, page_size: int, heads: Heads, seed: int) -> None:
        self.num_pages, self.page_size, self.heads = num_pages, page_size, heads
        self.free = np.random.default_rng(seed).permutation(num_pages).tolist()
        shape = (num_pages * page_size, heads.num_kv_heads, heads.head_dim)
        self.k, self.v = np.full(shape, np.nan), np.full(shape, np.nan)

    def write(self, lane: Lane, rng: np.random.Generator) -> tuple[list[int], np.ndarray]:
        """The lane's pages, now with content, and the slot of each of its lane indices."""
        pages = [self.free.pop() for _ in lane.owners]
        slots = (np.asarray(pages, int)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        written = slots[np.asarray(sorted(lane.written), int)]
        for pool in (self.k, self.v):
            pool[written] = rng.standard_normal((len(written), *pool.shape[1:]))
        return pages, slots

    def on_device(self) -> tuple[jax.Array, jax.Array]:
        shape = (self.num_pages, self.page_size, *self.k.shape[1:])
        return jnp.asarray(self.k.reshape(shape), self.heads.dtype), jnp.asarray(
            self.v.reshape(shape), self.heads.dtype
        )


def make_scene(
    decode: Sequence[Lane] = (),
    prefill: Sequence[Lane] = (),
    *,
    decode_rows: int | None = None,
    decode_width: int = 1,
    prefill_rows: int | None = None,
    prefill_tokens: int | None = None,
    num_words: int = 0,
    heads: Heads = Heads(),  # noqa: B008 (frozen)
    seed: int = 0,
    redrawn_rows: Sequence[int] = (),
    window: int | None = None,
) -> Scene:
    """Arrange lanes as rows of a step; counts of rows and tokens are padded up to the given numbers.

    Args:
        window: tokens that each query sees at most; None: there are no lower bounds.
        redrawn_rows: rows whose queries, keys and values are drawn anew, everything else staying bitwise the same.
    """
    if window is not None:
        decode, prefill = ([windowed(lane, window) for lane in lanes] for lanes in (decode, prefill))
    decode_rows = len(decode) if decode_rows is None else decode_rows
    rows = decode_rows + (len(prefill) if prefill_rows is None else prefill_rows)
    lanes = {**dict(enumerate(decode)), **{decode_rows + i: lane for i, lane in enumerate(prefill)}}
    if prefill_tokens is None:
        prefill_tokens = sum(len(lane.queries) for lane in prefill)
    tokens = decode_rows * decode_width + prefill_tokens
    page_size = next(iter(lanes.values())).page_size
    pool = _Pool(sum(len(lane.owners) for lane in lanes.values()) + 3, page_size, heads, seed)
    poisoned = pool.free.pop()  # page tables are padded with a page that holds NaN alone

    width = max(len(lane.owners) for lane in lanes.values()) + 1
    page_table, page_branch = np.full((rows, width), poisoned), np.full((rows, width), -1)
    by_row = {name: np.zeros(rows, np.int32) for name in ("kv_len", "trunk_len", "tail_start")}
    by_token = {name: np.full(tokens, -1) for name in ("limit", "branch", "first")}
    row_of = np.full(tokens, -1)
    slot_mapping = pool.num_pages * page_size + np.arange(tokens)
    tail_bits = np.zeros((tokens, num_words), np.uint32)
    query_start_loc = np.arange(rows + 1) * decode_width
    q = np.random.default_rng(seed + 1).standard_normal((tokens, heads.num_heads, heads.head_dim))
    seen: dict[int, np.ndarray] = {}
    start = decode_rows * decode_width
    for row in range(rows):
        is_decode = row < decode_rows
        if not is_decode:
            query_start_loc[row] = start
        if row not in lanes:
            continue
        lane = lanes[row]
        rng = np.random.default_rng([seed, row, row in redrawn_rows])
        pages, slots = pool.write(lane, rng)
        page_table[row, : len(pages)], page_branch[row, : len(pages)] = pages, lane.owners
        for name, values in by_row.items():
            values[row] = getattr(lane, name)
        first = query_start_loc[row]
        for t, query in enumerate(lane.queries, first):
            q[t] = rng.standard_normal(q.shape[1:])
            row_of[t] = row
            for name, values in by_token.items():
                values[t] = getattr(query, name)
            tail_bits[t], slot_mapping[t] = tail_words(query.tail, num_words), slots[query.index]
            seen[t] = slots[sorted(query.sees)]
        start += 0 if is_decode else len(lane.queries)
    query_start_loc[rows] = start

    q_device, (k_pages, v_pages) = jnp.asarray(q, heads.dtype), pool.on_device()
    # What the backend gets is rounded to its dtype; the answer is that of the rounded numbers.
    rounded = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q_device, k_pages, v_pages)]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in rounded[1:])
    scale = heads.head_dim**-0.5
    expected = np.zeros(q.shape)
    for t, slots in seen.items():
        expected[t] = dense_attention(rounded[0][t], k[slots], v[slots], scale, heads.cap, heads.sinks)
    arrays = {
        "slot_mapping": slot_mapping,
        "row": np.maximum(row_of, 0),
        "page_table": page_table,
        "page_branch": page_branch,
        "query_start_loc": query_start_loc,
        **by_row,
        **by_token,
    }
    if window is None:
        arrays["first"] = np.zeros(0)
    metadata = AttentionMetadata(
        **{name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()},
        tail_bits=jnp.asarray(tail_bits),
        decode_rows=decode_rows,
        decode_width=decode_width,
    )
    return Scene(q_device, k_pages, v_pages, metadata, scale, heads, expected, row_of)

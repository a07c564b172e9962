"""The kernel for Hopper, in Pallas for Mosaic GPU: one program for each token.

A program loads the heads of its token by TMA, queries and keys as the rows of one tile and the values beside it. Values
leave for their page at once. Queries and keys are normalised and rotated in registers, in float32, and leave together.
The pages are changed in place: they come in as references, which makes them inputs and outputs at the same address.

Proved so far by interpretation on a CPU and by compilation for an H200; not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Heads that a warpgroup holds in registers at a time.
TILE_ROWS = 64
WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)


@dataclass(frozen=True)
class Launch:
    """Static sizes of one launch."""

    kv_heads: int
    group: int  # query heads of one KV head
    head_dim: int
    page_size: int
    num_slots: int
    eps: float | None  # of the norm of every head; None: there is none
    dtype: jnp.dtype

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def tile_rows(self) -> int:
        """Rows for all queries and keys, in whole tiles."""
        return -(-(self.query_heads + self.kv_heads) // TILE_ROWS) * TILE_ROWS

    @property
    def shared_memory_bytes(self) -> int:
        """Of one program, in 16-bit precision."""
        heads = (self.tile_rows + self.kv_heads) * self.head_dim * 2
        return heads + self.head_dim * 4 + 2 * self.head_dim * 2


def rotate_and_write_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    launch: Launch,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [T, num_heads, head_dim], and the pages with the new keys and values; see the API for the rest.

    Args:
        scales: of the norms of queries and of keys, [head_dim] each.
        interpret: `InterpretGPUParams` to run on a CPU.
    """
    inputs = {"qkv": qkv, "cos": cos, "sin": sin, "slots": slot_mapping}
    if scales is not None:
        inputs |= {"q_scale": scales[0], "k_scale": scales[1]}
    pages = {"k_pages": jax.new_ref(k_pages), "v_pages": jax.new_ref(v_pages)}
    names = [*inputs, *pages, "q"]

    def body(*references: Any, **scratch: Any) -> None:
        _program(launch, SimpleNamespace(**dict(zip(names, references, strict=True))), SimpleNamespace(**scratch))

    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((qkv.shape[0], launch.query_heads, launch.head_dim), launch.dtype),
        scratch_types=_scratch(launch),
        grid=(qkv.shape[0],),
        grid_names=("token",),
        kernel_name="rotate_and_write",
        interpret=interpret,
    )(*inputs.values(), *pages.values())
    return q, jax.freeze(pages["k_pages"]), jax.freeze(pages["v_pages"])


def _scratch(launch: Launch) -> dict[str, Any]:
    half = plgpu.SMEM((launch.head_dim // 2,), jnp.float32)
    scratch: dict[str, Any] = {
        "heads": plgpu.SMEM((launch.tile_rows, launch.head_dim), launch.dtype),
        "values": plgpu.SMEM((launch.kv_heads, launch.head_dim), launch.dtype),
        "cos": half,
        "sin": half,
    }
    loads = launch.kv_heads + len(("keys", "values", "cos", "sin"))
    if launch.eps is not None:
        scratch |= {name: plgpu.SMEM((launch.head_dim,), launch.dtype) for name in ("q_scale", "k_scale")}
        loads += len(("q_scale", "k_scale"))
    return scratch | {"loaded": plgpu.Barrier(num_arrivals=loads)}


def _program(launch: Launch, memory: Any, place: Any) -> None:
    token = lax.axis_index("token")
    group, queries, keys = launch.group, launch.query_heads, launch.kv_heads

    @pl.loop(0, keys)
    def _(head):
        rows = place.heads.at[pl.ds(head * group, group)]
        plgpu.copy_gmem_to_smem(memory.qkv.at[token, head, pl.ds(0, group)], rows, place.loaded)

    loads = [
        (memory.qkv.at[token, :, group], place.heads.at[pl.ds(queries, keys)]),
        (memory.qkv.at[token, :, group + 1], place.values),
        (memory.cos.at[token], place.cos),
        (memory.sin.at[token], place.sin),
    ]
    if launch.eps is not None:
        loads += [(memory.q_scale, place.q_scale), (memory.k_scale, place.k_scale)]
    for source, target in loads:
        plgpu.copy_gmem_to_smem(source, target, place.loaded)
    slot = memory.slots[token]
    kept = (slot >= 0) & (slot < launch.num_slots)
    page, offset = lax.div(slot, jnp.int32(launch.page_size)), lax.rem(slot, jnp.int32(launch.page_size))
    plgpu.barrier_wait(place.loaded)

    @pl.when(kept)
    def _():
        plgpu.copy_smem_to_gmem(place.values, memory.v_pages.at[page, offset])

    for first in range(0, queries + keys, TILE_ROWS):
        _rotate_tile(launch, place, first)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(place.heads.at[pl.ds(0, queries)], memory.q.at[token])

    @pl.when(kept)
    def _():
        plgpu.copy_smem_to_gmem(place.heads.at[pl.ds(queries, keys)], memory.k_pages.at[page, offset])

    plgpu.wait_smem_to_gmem(0)


def _rotate_tile(launch: Launch, place: Any, first: int) -> None:
    """Normalise and rotate in shared memory the heads of rows [first, first + TILE_ROWS)."""
    tile = place.heads.at[pl.ds(first, TILE_ROWS)]
    x = plgpu.load(tile, layout=WGMMA, optimized=False).astype(jnp.float32)
    if launch.eps is not None:
        mean = (x * x).sum(axis=1) * (1.0 / launch.head_dim)
        inverse = lax.rsqrt(mean + launch.eps)
        # Rounded where the reference rounds: before the product with the scale, and after it.
        x = _rounded(launch, x * lax.broadcast_in_dim(inverse, x.shape, [0]))
        x = _rounded(launch, x * _scale(launch, place, first))
    half = launch.head_dim // 2
    left, right = x[:, :half], x[:, half:]
    cos, sin = (_across(ref, (TILE_ROWS, half)) for ref in (place.cos, place.sin))
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=1)
    tile[...] = rotated.astype(launch.dtype)


def _scale(launch: Launch, place: Any, first: int) -> jax.Array:
    """float32 [TILE_ROWS, head_dim]: the norm's scale in every row of a tile, of queries or of keys."""
    shape = (TILE_ROWS, launch.head_dim)
    if first + TILE_ROWS <= launch.query_heads:
        return _across(place.q_scale, shape)
    if first >= launch.query_heads:
        return _across(place.k_scale, shape)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
    return jnp.where(row < launch.query_heads - first, _across(place.q_scale, shape), _across(place.k_scale, shape))


def _across(columns: Any, shape: tuple[int, int]) -> jax.Array:
    """A reference of [columns] as float32 rows, the same in every row."""
    values = plgpu.load(columns, layout=COLUMNS, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(values, shape, [1])


def _rounded(launch: Launch, x: jax.Array) -> jax.Array:
    return x.astype(launch.dtype).astype(jnp.float32)

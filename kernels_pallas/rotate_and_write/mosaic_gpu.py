"""The kernel for Hopper, in Pallas for Mosaic GPU: one program for each token.

A program loads the heads of its token by TMA, as rows: queries, then keys, then values. In registers and in float32 it
sums their parts, if any, and normalises and rotates queries and keys. Then it stores queries, keys and values. The
pages are changed in place: they are passed as references, which makes them inputs and outputs at the same address.

Tested in interpretation on a CPU, by compilation for an H200, and on an H200.
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
COLUMNS = WGMMA.reduce(0)


@dataclass(frozen=True)
class HeadsLaunch:
    """Static sizes of one launch."""

    kv_heads: int
    group: int  # query heads of one KV head
    head_dim: int
    page_size: int
    num_slots: int
    eps: float | None  # epsilon of the heads' norms; None: no norms
    wide_scale: bool  # whether their scales are float32, and norms are rounded after the product with them alone
    parts: int  # float32 parts of the projection; 0: it is whole
    bias: bool  # whether a bias is to be added to the sum of parts
    dtype: jnp.dtype

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def rotated_heads(self) -> int:
        return self.query_heads + self.kv_heads

    @property
    def heads(self) -> int:
        return self.rotated_heads + self.kv_heads

    @property
    def tile_rows(self) -> int:
        """Number of rows for all heads, padded to whole tiles."""
        return -(-self.heads // TILE_ROWS) * TILE_ROWS

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of one program in 16-bit precision."""
        heads = self.tile_rows * self.head_dim * (2 + 4 * self.parts + 2 * self.bias)
        return heads + self.head_dim * 4 + 2 * self.head_dim * (4 if self.wide_scale else 2)


def rotate_and_write_heads(
    qkv: jax.Array,
    bias: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    launch: HeadsLaunch,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated queries [T, num_heads, head_dim], and the pages with the new keys and values; see `api`.

    Args:
        qkv: [T, num_kv_heads, group + 2, head_dim], or float32 [parts, T, ...].
        bias: bias of the sum of parts, [num_kv_heads, group + 2, head_dim].
        scales: scales of the norms of queries and of keys, [head_dim] each, float32 or like the heads.
        interpret: `InterpretGPUParams` to run on a CPU.
    """
    inputs = {"qkv": qkv, "cos": cos, "sin": sin, "slots": slot_mapping}
    if bias is not None:
        inputs |= {"bias": bias}
    if scales is not None:
        inputs |= {"q_scale": scales[0], "k_scale": scales[1]}
    pages = {"k_pages": jax.new_ref(k_pages), "v_pages": jax.new_ref(v_pages)}
    names = [*inputs, *pages, "q"]

    def body(*references: Any, **scratch: Any) -> None:
        _program(launch, SimpleNamespace(**dict(zip(names, references, strict=True))), SimpleNamespace(**scratch))

    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((cos.shape[0], launch.query_heads, launch.head_dim), launch.dtype),
        scratch_types=_scratch(launch),
        grid=(cos.shape[0],),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="rotate_and_write",
        interpret=interpret,
    )(*inputs.values(), *pages.values())
    return q, jax.freeze(pages["k_pages"]), jax.freeze(pages["v_pages"])


def _scratch(launch: HeadsLaunch) -> dict[str, Any]:
    half = plgpu.SMEM((launch.head_dim // 2,), jnp.float32)
    scratch: dict[str, Any] = {
        "heads": plgpu.SMEM((launch.tile_rows, launch.head_dim), launch.dtype),
        "cos": half,
        "sin": half,
    }
    loads = (launch.kv_heads + len(("keys", "values"))) * (max(1, launch.parts) + launch.bias) + len(("cos", "sin"))
    if launch.parts:
        scratch["parts"] = plgpu.SMEM((launch.parts, launch.tile_rows, launch.head_dim), jnp.float32)
    if launch.bias:
        scratch["bias"] = plgpu.SMEM((launch.tile_rows, launch.head_dim), launch.dtype)
    if launch.eps is not None:
        scale = plgpu.SMEM((launch.head_dim,), jnp.float32 if launch.wide_scale else launch.dtype)
        scratch |= {"q_scale": scale, "k_scale": scale}
        loads += len(("q_scale", "k_scale"))
    return scratch | {"loaded": plgpu.Barrier(num_arrivals=loads)}


def _program(launch: HeadsLaunch, memory: Any, place: Any) -> None:
    token = lax.axis_index("token")
    if launch.parts:

        @pl.loop(0, launch.parts)
        def _(part):
            _load_heads(launch, memory.qkv.at[part, token], place.parts.at[part], place.loaded)
    else:
        _load_heads(launch, memory.qkv.at[token], place.heads, place.loaded)
    if launch.bias:
        _load_heads(launch, memory.bias, place.bias, place.loaded)
    plgpu.copy_gmem_to_smem(memory.cos.at[token], place.cos, place.loaded)
    plgpu.copy_gmem_to_smem(memory.sin.at[token], place.sin, place.loaded)
    if launch.eps is not None:
        plgpu.copy_gmem_to_smem(memory.q_scale, place.q_scale, place.loaded)
        plgpu.copy_gmem_to_smem(memory.k_scale, place.k_scale, place.loaded)
    slot = memory.slots[token]
    page, offset = lax.div(slot, jnp.int32(launch.page_size)), lax.rem(slot, jnp.int32(launch.page_size))
    plgpu.barrier_wait(place.loaded)
    for first in range(0, launch.heads, TILE_ROWS):
        _finish_tile(launch, place, first)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(place.heads.at[pl.ds(0, launch.query_heads)], memory.q.at[token])

    @pl.when((slot >= 0) & (slot < launch.num_slots))
    def _():
        for pages, first in ((memory.k_pages, launch.query_heads), (memory.v_pages, launch.rotated_heads)):
            plgpu.copy_smem_to_gmem(place.heads.at[pl.ds(first, launch.kv_heads)], pages.at[page, offset])

    plgpu.wait_smem_to_gmem(0)


def _load_heads(launch: HeadsLaunch, source: Any, rows: Any, loaded: Any) -> None:
    """Start the copies of one token's heads [num_kv_heads, group + 2, head_dim] into rows ordered by kind."""
    group = launch.group

    @pl.loop(0, launch.kv_heads)
    def _(head):
        plgpu.copy_gmem_to_smem(source.at[head, pl.ds(0, group)], rows.at[pl.ds(head * group, group)], loaded)

    for kind, first in ((group, launch.query_heads), (group + 1, launch.rotated_heads)):
        plgpu.copy_gmem_to_smem(source.at[:, kind], rows.at[pl.ds(first, launch.kv_heads)], loaded)


def _finish_tile(launch: HeadsLaunch, place: Any, first: int) -> None:
    """Sum, normalise and rotate the heads of rows [first, first + TILE_ROWS) in shared memory."""
    rows = pl.ds(first, TILE_ROWS)
    if launch.parts:
        projected = _load(place.parts.at[0, rows])
        for part in range(1, launch.parts):
            projected += _load(place.parts.at[part, rows])
        projected = _rounded(launch, projected)
        if launch.bias:
            projected = _rounded(launch, projected + _load(place.bias.at[rows]))
    elif first >= launch.rotated_heads:
        return
    else:
        projected = _load(place.heads.at[rows])
    x = projected
    if launch.eps is not None:
        mean = (x * x).sum(axis=1) * (1.0 / launch.head_dim)
        inverse = lax.rsqrt(mean + launch.eps)
        # Rounded where the reference rounds: after the product with the scale, and before it unless it is float32.
        x *= lax.broadcast_in_dim(inverse, x.shape, [0])
        if not launch.wide_scale:
            x = _rounded(launch, x)
        x = _rounded(launch, x * _scale(launch, place, first))
    half = launch.head_dim // 2
    left, right = x[:, :half], x[:, half:]
    cos, sin = (_across(ref, (TILE_ROWS, half)) for ref in (place.cos, place.sin))
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=1)
    if first + TILE_ROWS > launch.rotated_heads:
        if not launch.parts:
            # Loaded again after a fence, the heads need no registers meanwhile: with heads of 256 there are not enough.
            plgpu.commit_smem()
            projected = _load(place.heads.at[rows])
        rotated = jnp.where(_row(launch) < launch.rotated_heads - first, rotated, projected)
    _store(place.heads.at[rows], rotated.astype(launch.dtype))


def _scale(launch: HeadsLaunch, place: Any, first: int) -> jax.Array:
    """Return float32 [TILE_ROWS, head_dim]: the scale of the queries' or keys' norm for every row of a tile."""
    shape = (TILE_ROWS, launch.head_dim)
    if first + TILE_ROWS <= launch.query_heads:
        return _across(place.q_scale, shape)
    if first >= launch.query_heads:
        return _across(place.k_scale, shape)
    return jnp.where(
        _row(launch) < launch.query_heads - first, _across(place.q_scale, shape), _across(place.k_scale, shape)
    )


def _row(launch: HeadsLaunch) -> jax.Array:
    """Return int32 [TILE_ROWS, head_dim]: the row of each element of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, launch.head_dim), 0, layout=WGMMA)


def _load(tile: Any) -> jax.Array:
    return plgpu.load(tile, layout=WGMMA, optimized=False).astype(jnp.float32)


def _store(tile: Any, values: jax.Array) -> None:
    # TMA needs plain rows, whose stores have bank conflicts: JAX 0.12 has to be told that this is intended.
    if hasattr(plgpu, "store"):
        plgpu.store(tile, values, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tile[...] = values


def _across(columns: Any, shape: tuple[int, int]) -> jax.Array:
    """Broadcast a reference of [columns] to float32 rows, the same in every row."""
    values = plgpu.load(columns, layout=COLUMNS, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(values, shape, [1])


def _rounded(launch: HeadsLaunch, x: jax.Array) -> jax.Array:
    return x.astype(launch.dtype).astype(jnp.float32)

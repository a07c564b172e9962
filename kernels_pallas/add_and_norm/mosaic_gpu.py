"""The kernel for Hopper, in Pallas for Mosaic GPU: one program for each token, its row in registers.

Tested in interpretation on a CPU and by compilation for an H200; whole models ran with it on an H200.
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

# Threads of a warpgroup: a row is spread over all of them.
THREADS = 128
# Fewest elements of a row: one for each thread.
MIN_SIZE = THREADS
# Most neighbouring elements that a thread loads at once.
MAX_VECTOR = 4


@dataclass(frozen=True)
class RowPiece:
    """Neighbouring elements of a row, spread evenly over all threads.

    Its first `repeated` elements are in the piece before it, too.
    """

    start: int
    size: int
    repeated: int = 0

    @property
    def layout(self) -> Any:
        vector = MAX_VECTOR
        while self.size % (THREADS * vector):
            vector //= 2
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=vector)


@dataclass(frozen=True)
class RowsLaunch:
    """Static sizes of one launch."""

    size: int  # elements of a row
    parts: int  # float32 parts of y; 0: it is whole
    bias: bool  # whether a bias is to be added to the sum of parts
    eps: float
    wide_scale: bool  # whether the scale is float32, and the norm is rounded after the product with it alone
    dtype: jnp.dtype

    @property
    def pieces(self) -> tuple[RowPiece, ...]:
        """The whole row, or two overlapping pieces if the row has no multiple of `THREADS` elements.

        What is in both pieces is computed twice and stored twice, with the same values.
        """
        rest = self.size % THREADS
        if not rest:
            return (RowPiece(0, self.size),)
        return RowPiece(0, self.size - rest), RowPiece(self.size - THREADS, THREADS, repeated=THREADS - rest)


def add_and_norm_rows(
    x: jax.Array, y: jax.Array, bias: jax.Array | None, scale: jax.Array, *, launch: RowsLaunch, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return x + y and its norm, [T, N] each; see `api`.

    Args:
        y: [T, N], or float32 [parts, T, N].
        scale: [N], float32 or like x; see `RowsLaunch`.
        interpret: `InterpretGPUParams` to run on a CPU.
    """
    inputs = {"x": x, "y": y, "scale": scale} | ({} if bias is None else {"bias": bias})
    names = (*inputs, "total", "normed")

    def body(*references: Any) -> None:
        _program(launch, SimpleNamespace(**dict(zip(names, references, strict=True))))

    total, normed = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, launch.dtype)] * 2,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        grid=(x.shape[0],),
        grid_names=("token",),
        kernel_name="add_and_norm",
        interpret=interpret,
    )(*inputs.values())
    return total, normed


def _program(launch: RowsLaunch, memory: Any) -> None:
    token = lax.axis_index("token")
    totals = [_total(launch, piece, memory, token) for piece in launch.pieces]
    for piece, total in zip(launch.pieces, totals, strict=True):
        _elements(launch, piece, memory.total.at[token])[...] = total.astype(launch.dtype)
    first, *more = (_sum_of_squares(piece, total) for piece, total in zip(launch.pieces, totals, strict=True))
    inverse = lax.rsqrt(sum(more, first) * (1.0 / launch.size) + launch.eps)
    for piece, total in zip(launch.pieces, totals, strict=True):
        normed = total * inverse
        if not launch.wide_scale:
            normed = _rounded(launch, normed)
        normed *= _load(launch, piece, memory.scale)
        _elements(launch, piece, memory.normed.at[token])[...] = normed.astype(launch.dtype)


def _total(launch: RowsLaunch, piece: RowPiece, memory: Any, token: jax.Array) -> jax.Array:
    """Return a piece of the residual stream plus the result, in float32, rounded wherever the reference rounds."""
    if launch.parts:
        y = _load(launch, piece, memory.y.at[0, token])
        for part in range(1, launch.parts):
            y += _load(launch, piece, memory.y.at[part, token])
        y = _rounded(launch, y)
        if launch.bias:
            y = _rounded(launch, y + _load(launch, piece, memory.bias))
    else:
        y = _load(launch, piece, memory.y.at[token])
    return _rounded(launch, _load(launch, piece, memory.x.at[token]) + y)


def _sum_of_squares(piece: RowPiece, total: jax.Array) -> jax.Array:
    """Return the sum of the squares of those elements of a piece that no other piece has counted."""
    squares = total * total
    if piece.repeated:
        index = plgpu.broadcasted_iota(jnp.int32, (piece.size,), 0, layout=piece.layout)
        squares = jnp.where(index < piece.repeated, 0.0, squares)
    return squares.sum()


def _load(launch: RowsLaunch, piece: RowPiece, row: Any) -> jax.Array:
    """Load a piece of a row as float32."""
    return plgpu.load(_elements(launch, piece, row), layout=piece.layout, optimized=False).astype(jnp.float32)


def _elements(launch: RowsLaunch, piece: RowPiece, row: Any) -> Any:
    """Return a reference of a piece's elements."""
    return row if piece.size == launch.size else row.at[pl.ds(piece.start, piece.size)]


def _rounded(launch: RowsLaunch, x: jax.Array) -> jax.Array:
    return x.astype(launch.dtype).astype(jnp.float32)

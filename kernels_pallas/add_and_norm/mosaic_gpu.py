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
from jax.experimental.pallas import mosaic_gpu as plgpu

# Threads of a warpgroup: a row is spread over all of them.
THREADS = 128
# Most neighbouring elements that a thread loads at once.
MAX_VECTOR = 4


@dataclass(frozen=True)
class RowsLaunch:
    """Static sizes of one launch."""

    size: int  # elements of a row
    parts: int  # float32 parts of y; 0: it is whole
    bias: bool  # whether a bias is to be added to the sum of parts
    eps: float
    dtype: jnp.dtype

    @property
    def layout(self) -> Any:
        vector = MAX_VECTOR
        while self.size % (THREADS * vector):
            vector //= 2
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=vector)


def add_and_norm_rows(
    x: jax.Array, y: jax.Array, bias: jax.Array | None, scale: jax.Array, *, launch: RowsLaunch, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return x + y and its norm, [T, N] each; see `api`.

    Args:
        y: [T, N], or float32 [parts, T, N].
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

    def row(reference: Any) -> jax.Array:
        return plgpu.load(reference, layout=launch.layout, optimized=False).astype(jnp.float32)

    if launch.parts:
        y = row(memory.y.at[0, token])
        for part in range(1, launch.parts):
            y += row(memory.y.at[part, token])
        y = _rounded(launch, y)
        if launch.bias:
            y = _rounded(launch, y + row(memory.bias))
    else:
        y = row(memory.y.at[token])
    # Rounded wherever the reference rounds.
    total = _rounded(launch, row(memory.x.at[token]) + y)
    memory.total.at[token][...] = total.astype(launch.dtype)
    inverse = lax.rsqrt((total * total).sum() * (1.0 / launch.size) + launch.eps)
    normed = _rounded(launch, total * inverse) * row(memory.scale)
    memory.normed.at[token][...] = normed.astype(launch.dtype)


def _rounded(launch: RowsLaunch, x: jax.Array) -> jax.Array:
    return x.astype(launch.dtype).astype(jnp.float32)

"""Residual add and norm of the sum: the kernel if it can run, else the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.add_and_norm import reference as plain
from kernels_pallas.add_and_norm.mosaic_gpu import MIN_SIZE, RowsLaunch, add_and_norm_rows
from kernels_pallas.devices import tell_once, why_not_here
from kernels_pallas.parts import Parts

DTYPES = ("bfloat16", "float16")
# A row is held in the registers of one warpgroup.
MAX_SIZE = 16384
# With other sizes, some rows would begin where several elements cannot be loaded at once.
SIZE_STEP = 64

type Reference = Callable[..., tuple[jax.Array, jax.Array]]


def add_and_norm(
    x: jax.Array,
    y: jax.Array | Parts,
    scale: jax.Array,
    eps: float,
    *,
    reference: Reference = plain.add_and_norm,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return x + y, and (x + y) / rms(x + y) * scale, over the last axis.

    Args:
        x: [T, N], the residual stream.
        y: [T, N], a layer's result, whole or in parts.
        scale: [N], scale of the norm, in x's dtype or in float32; see `reference.rms_norm`.
        reference: computes the result from (x, y, scale, eps) if the kernel cannot run; the reason is logged once.
        interpret: `InterpretGPUParams`, to run the kernel on a CPU.

    Returns:
        [T, N] each, in x's dtype.
    """
    reason = why_not(x, y, scale) or (None if interpret else why_not_here())
    if reason is not None:
        tell_once("residual and norm run", reason)
        return reference(x, y, scale, eps)
    values, bias, parts = (y.values, y.bias, len(y)) if isinstance(y, Parts) else (y, None, 0)
    launch = RowsLaunch(x.shape[1], parts, bias is not None, eps, scale.dtype != x.dtype, x.dtype)
    return add_and_norm_rows(x, values, bias, scale, launch=launch, interpret=interpret)


def why_not(x: jax.Array, y: jax.Array | Parts, scale: jax.Array) -> str | None:
    """Return the reason why the kernel does not take these shapes; None if it does."""
    if x.dtype.name not in DTYPES or x.dtype != y.dtype or scale.dtype not in (x.dtype, jnp.float32):
        found = f"residual, result and scale are {x.dtype}, {y.dtype} and {scale.dtype}"
        return f"{found}, all must be bfloat16 or float16, and the scale may be float32"
    if x.ndim != 2:
        return f"the residual has {x.ndim} axes, must have 2"
    if x.shape[1] % SIZE_STEP or not MIN_SIZE <= x.shape[1] <= MAX_SIZE:
        return f"the hidden size is {x.shape[1]}, must be a multiple of {SIZE_STEP} from {MIN_SIZE} to {MAX_SIZE}"
    return None

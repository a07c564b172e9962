"""Dtypes of weights: their names, and the check that values fit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.errors import CheckpointError

_NAMES = {
    "float32": np.dtype(np.float32),
    "float": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "half": np.dtype(np.float16),
}


def parse_dtype(dtype: Any) -> np.dtype | None:
    """Return the dtype for a name or dtype object; None for None and "auto", which keep the checkpoint's.

    Raises:
        ValueError: any other value.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    if isinstance(dtype, str) and dtype in _NAMES:
        return _NAMES[dtype]
    if not isinstance(dtype, str):
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = None
        if found is not None and found in _NAMES.values():
            return found
    raise ValueError(f"dtype={dtype!r} is not supported; allowed: auto, {', '.join(_NAMES)}")


def narrow(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Cast `values` to a dtype; they are not copied if they have it already.

    Raises:
        CheckpointError: see `check_narrowed`.
    """
    with np.errstate(over="ignore"):  # reported by name
        narrowed = values.astype(dtype, copy=False)
    check_narrowed(narrowed, values.dtype, name)
    return narrowed


def check_narrowed(narrowed: np.ndarray, source: np.dtype, name: str) -> None:
    """Check weights that were cast from `source`: float16 has a much smaller range than the other dtypes.

    Raises:
        CheckpointError: a value is infinite or NaN; the message names the tensor `name`.
    """
    if narrowed.dtype == np.float16 and source != np.float16 and not np.isfinite(narrowed).all():
        raise CheckpointError(
            f"{name} has values that float16 cannot hold (its largest is 65504, and NaN or infinity are not weights); "
            "use bfloat16 or float32"
        )

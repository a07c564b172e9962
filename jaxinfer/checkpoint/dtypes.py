"""Names of weight dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_NAMES = {
    "float32": np.dtype(np.float32),
    "float": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "half": np.dtype(np.float16),
}


def parse_dtype(dtype: Any) -> np.dtype | None:
    """A dtype of weights from its name or from a dtype object; None for None and "auto" (what the checkpoint has).

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

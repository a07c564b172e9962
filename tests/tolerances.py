"""How far float32 results may be from the truth, where that depends on the device."""

from __future__ import annotations

import jax


def tolerance(on_cpu: float) -> float:
    """`on_cpu`, or ten times that on a GPU: it adds in other orders, and its exp, log, sin and cos are less exact."""
    return on_cpu if jax.default_backend() == "cpu" else 10 * on_cpu

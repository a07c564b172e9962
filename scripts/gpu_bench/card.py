"""Rates of this card: how fast it reads and copies memory and multiplies matrices. Other results are shares of them."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from gpu_bench.plan import Case
from gpu_bench.timing import Timing, time_launches
from jaxinfer.bench.environment import describe_environment

_QUERY = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit")
_PACKAGES = (
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "torch",
    "transformers",
)


def describe_machine() -> dict[str, Any]:
    """Versions, device and date, and what the driver says about the card."""
    described = describe_environment()
    for name in _PACKAGES:
        try:
            described["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    return described | {"card": describe_card()}


def describe_card() -> dict[str, str] | None:
    """What the driver's own tool says, or None where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (FileNotFoundError, subprocess.SubprocessError):
        return None
    return dict(zip(_QUERY, (value.strip() for value in found.splitlines()[0].split(",")), strict=True))


def measure_card(case: Case) -> dict[str, Any]:
    """One row: bytes or operations per second, by the best round; nothing here can be faster than the card."""
    if case["kind"] == "matmul":
        return _matmul(case["size"])
    elements = case["size"] // 4
    # A matrix of fresh numbers: the compiler must not know them, and memory of zeros may be read faster.
    x = jax.random.normal(jax.random.key(1), (elements // 4096, 4096), jnp.float32).block_until_ready()
    if case["kind"] == "copy":
        copy = jax.jit(lambda x: x + 1)
        timing = time_launches(lambda: copy(x))
        return _rate(timing, "bytes_per_second", 2 * x.nbytes) | {"form": "x + 1, read and written bytes counted"}
    forms = {
        "sum of rows": jax.jit(lambda x: jnp.sum(x, axis=1)),
        "sum": jax.jit(jnp.sum),
        "largest of rows": jax.jit(lambda x: jnp.max(x, axis=1)),
    }
    rows = {
        name: _rate(time_launches(lambda run=run: run(x)), "bytes_per_second", x.nbytes) for name, run in forms.items()
    }
    best = max(rows, key=lambda name: rows[name]["bytes_per_second"])
    return rows[best] | {"form": best, "forms": {name: row["bytes_per_second"] for name, row in rows.items()}}


def _matmul(size: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(2), 2)
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    multiply = jax.jit(jnp.matmul)
    timing = time_launches(lambda: multiply(a, b))
    return _rate(timing, "flops_per_second", 2 * size**3) | {"form": f"{size} cubed, random numbers"}


def _rate(timing: Timing, name: str, amount: int) -> dict[str, Any]:
    return timing.row() | {name: amount / timing.best_s}

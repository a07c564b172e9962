"""A simulated device whose launches take a given time, to measure the engine's host side with a slower device."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.core import EngineCore
from jaxinfer.programs.packing import layout_of
from jaxinfer.programs.step import StepOutput


class Later:
    """An array that is there at a certain time, however long before it was computed."""

    def __init__(self, array: jax.Array, ready: float) -> None:
        self._array, self._ready = array, ready

    def __getitem__(self, key: Any) -> Later:
        return Later(self._array[key], self._ready)

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._ready and bool(np.all(jax.tree.map(lambda x: x.is_ready(), self._array)))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        found = np.asarray(self._array, dtype)
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return found


def slow_down(core: EngineCore, seconds: float) -> None:
    """Let every step and round of an engine take so long, one after the other; what else is launched takes nothing.

    The real device has to be faster.
    """
    launch, end = core.runner.launch, 0.0

    def slow(program: Any, shape: Any, *inputs: Any) -> Any:
        nonlocal end
        results = launch(program, shape, *inputs)
        is_step = isinstance(results, StepOutput)
        if not is_step and not hasattr(results, "tokens"):
            return results
        end = max(end, time.perf_counter()) + seconds * _rounds_of(shape, inputs[0])
        if is_step:
            return replace(results, token_ids=Later(results.token_ids, end))
        return replace(results, tokens=Later(results.tokens, end))

    core.runner.launch = slow  # pyright: ignore[reportAttributeAccessIssue]


def _rounds_of(shape: Any, buffer: np.ndarray) -> int:
    """The most rounds of any row of a packed batch."""
    place, extent, _ = layout_of(getattr(shape, "batch", shape)).places["num_steps"]
    return int(buffer[place].reshape(extent).max())

"""Devices as the sources name them, "cpu" or "cuda:0", and arrays on them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.backend import backends

type JaxDevice = Any  # a jax.Device, which JAX declares without a type
type Device = str | JaxDevice | None  # None: wherever JAX places arrays
type Array = np.ndarray | jax.Array


def device_of(device: Any) -> JaxDevice:
    """Return the JAX device of a name, or the device itself.

    Args:
        device: a `jax.Device`; or a name such as "cpu", "gpu" or "cuda", for the first of that platform, or with a
            number, as in "cuda:1"; or an object whose `str` is such a name.

    Raises:
        ValueError: there is no such device; the message lists those that there are.
    """
    if isinstance(device, jax.Device):
        return device
    platform, colon, number = str(device).partition(":")
    there = _devices(platform.lower()) if platform else []
    index = int(number) if number.isdecimal() else -1 if colon else 0
    if 0 <= index < len(there):
        return there[index]
    names = ", ".join(
        f"{kind}:{place}" for kind, client in backends().items() for place in range(len(client.devices()))
    )
    raise ValueError(f"device must be one of {names} or a jax.Device, got {device!r}")


def placed(values: np.ndarray, device: JaxDevice | None) -> Array:
    """Return values as a JAX array on a device; without a device, as the read-only NumPy array."""
    if device is None:
        values = values.view()
        values.setflags(write=False)
        return values
    # A copy: on a CPU, JAX would share the memory of an array that its owner changes later.
    return jax.device_put(values.copy(), device)


def _devices(kind: str) -> list[JaxDevice]:
    try:
        return jax.devices(kind)
    except RuntimeError:  # JAX's answer where there is no backend of that name
        return []

"""Devices as the sources name them, "cpu" or "cuda:0", and arrays on them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.backend import backends

type JaxDevice = Any  # a jax.Device, which JAX declares without a type
type Device = str | JaxDevice | None
type Array = np.ndarray | jax.Array


def device_of(device: str | JaxDevice) -> JaxDevice:
    """Return the JAX device of a name, or the device itself.

    Args:
        device: "cpu", "gpu", "cuda", "rocm" or "tpu", for the first of that kind, or with a number, as in "cuda:1".

    Raises:
        ValueError: it is no such name, or there is no such device here; the message lists the devices that there are.
    """
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind and (number.isdecimal() or not colon):
            found = _devices(kind.lower())
            index = int(number or 0)
            if index < len(found):
                return found[index]
    there = ", ".join(f'"{kind}:{i}"' for kind in backends() for i in range(len(jax.devices(kind))))
    raise ValueError(f"device: {device!r}, allowed are a jax.Device and the names of the devices here: {there}")


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

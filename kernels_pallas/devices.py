"""Devices that the kernels run on, and the warning elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import jax
from jax.extend.backend import get_default_device

HOPPER = ("H100", "H200", "H800", "H20", "GH200")

logger = logging.getLogger(__name__)
_told: set[tuple[str, str]] = set()


def compile_target() -> Any:
    """The device that programs are compiled for: that of the abstract mesh, or the default one."""
    return jax.sharding.get_abstract_mesh().abstract_device or get_default_device()


def num_cores() -> int:
    """Number of streaming multiprocessors of the device that programs are compiled for."""
    device = compile_target()
    return getattr(device, "num_cores", None) or device.core_count


def why_not_here() -> str | None:
    """Return the reason why the kernels do not run on the device that programs are compiled for; None if they do."""
    device = compile_target()
    if not any(name in device.device_kind for name in HOPPER):
        return f"the device is {device.device_kind!r}, the kernel is for {', '.join(HOPPER)}"
    return None


def tell_once(what: str, reason: str) -> None:
    """Warn, once for each reason, that the reference computes `what`, which is a subject with its verb."""
    if (what, reason) not in _told:
        _told.add((what, reason))
        logger.warning("%s as plain XLA, not as a Mosaic GPU kernel: %s", what, reason)

"""The environment of a measurement: versions, device and date, but no name of a machine or its owner."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Any

import jaxinfer


def describe_client() -> dict[str, Any]:
    """Return versions and date of a process that measures a server, for a JSON file. It loads no JAX."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"jaxinfer": jaxinfer.__version__, "python": platform.python_version()},
    }


def describe_environment() -> dict[str, Any]:
    """Return versions, device and date of this process, for a JSON file."""
    import jax

    device, found = jax.devices()[0], describe_client()
    found["versions"] |= {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return found | {
        "device": f"{os.cpu_count()}-core CPU" if device.platform == "cpu" else device.device_kind,
        "num_devices": jax.device_count(),
    }

"""The environment of a measurement: versions, device and date, but no name of a machine or its owner."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Any

import jax

import jaxinfer


def describe_environment() -> dict[str, Any]:
    """Return versions, device and date of this process, for a JSON file."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{os.cpu_count()}-core CPU" if device.platform == "cpu" else device.device_kind,
        "num_devices": jax.device_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "jaxinfer": jaxinfer.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        },
    }

"""Ray, which is optional, imported here alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

_OBJECT_STORE_BYTES = 100_000_000  # requests and answers pass through it
_MISSING = "several replicas need the extra `ray` (pip install 'jaxinfer[ray]'): {}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(_MISSING.format(error)) from error


ray: Any = _module("ray")
serve: Any = _module("ray.serve")
RequestRouterConfig: Any = _module("ray.serve.config").RequestRouterConfig
data: Any = _module("ray.data")
RayError: Any = _module("ray.exceptions").RayError


def is_remote() -> bool:
    """Whether RAY_ADDRESS names a cluster."""
    return bool(os.environ.get("RAY_ADDRESS"))


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS or, without that variable, start Ray on this machine alone."""
    if is_remote():
        ray.init()
    else:
        ray.init(
            "local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1"
        )


def gpus_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many GPUs an engine of these options takes, for Ray; nothing where the cluster has none."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return {"num_gpus": options.get("tensor_parallel_size", 1)} if has_gpus else {}

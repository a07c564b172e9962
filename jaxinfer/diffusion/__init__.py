"""Diffusion language models: blocks of tokens that are denoised in rounds."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Imported on demand, so that an engine does not load the textbook.
    if name == "DiffusionWorker":
        return importlib.import_module("jaxinfer.textbook.diffusion.worker").DiffusionWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

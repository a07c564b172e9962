"""jaxinfer: a JAX inference engine for language models on NVIDIA GPUs and CPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxinfer import moved

if TYPE_CHECKING:
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.branching.beam_search import BeamSearchParams
    from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
    from jaxinfer.diffusion.config import DiffusionConfig
    from jaxinfer.llm import LLM
    from jaxinfer.outputs import CompletionOutput, RequestOutput
    from jaxinfer.sampling_params import SamplingParams
    from jaxinfer.strategies.draft_options import SpeculativeConfig

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "DiffusionConfig", "RequestOutput", "SamplingParams",
    "SpeculativeConfig", "StructuredOutputsParams",
    "__version__",
]  # fmt: skip

_HOME = {
    "LLM": "jaxinfer.llm",
    "AsyncLLM": "jaxinfer.async_llm",
    "BeamSearchParams": "jaxinfer.branching.beam_search",
    "CompletionOutput": "jaxinfer.outputs",
    "DiffusionConfig": "jaxinfer.diffusion.config",
    "RequestOutput": "jaxinfer.outputs",
    "SamplingParams": "jaxinfer.sampling_params",
    "SpeculativeConfig": "jaxinfer.strategies.draft_options",
    "StructuredOutputsParams": "jaxinfer.constraints.structured_outputs",
}


moved.install()


def __getattr__(name: str) -> Any:
    # Importing JAX takes most of a second, which a request for the version or for --help must not wait for.
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

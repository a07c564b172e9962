"""Objects of SpecSoT's design of branches, under its own names: one state for both modes, alignment, KV, draft trees.

The design's examples can be written against these names. The engine uses none of them: its branches are ordinary
requests that share pages (`jaxinfer.branching`), in either mode without padding or copies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.textbook.alignment import AlignmentManager, AlignmentState, ContinuousDecodingState
    from jaxinfer.textbook.branching.cached_forward import CachedForward
    from jaxinfer.textbook.branching.decode import BranchForward, decode_branches
    from jaxinfer.textbook.branching.drafter import DrafterBIM, DraftTrees
    from jaxinfer.textbook.branching.eagle3_forward import Eagle3Forward
    from jaxinfer.textbook.branching.kv_cache import KVCache, ModelKVCache
    from jaxinfer.textbook.branching.state_manager import BranchStateManager

__all__ = [
    "AlignmentManager", "AlignmentState", "BranchForward", "BranchStateManager", "CachedForward",
    "ContinuousDecodingState", "DraftTrees", "DrafterBIM", "Eagle3Forward", "KVCache", "ModelKVCache",
    "decode_branches",
]  # fmt: skip

_HOME = {
    "AlignmentManager": "jaxinfer.textbook.alignment",
    "AlignmentState": "jaxinfer.textbook.alignment",
    "BranchForward": "jaxinfer.textbook.branching.decode",
    "BranchStateManager": "jaxinfer.textbook.branching.state_manager",
    "CachedForward": "jaxinfer.textbook.branching.cached_forward",
    "ContinuousDecodingState": "jaxinfer.textbook.alignment",
    "DraftTrees": "jaxinfer.textbook.branching.drafter",
    "DrafterBIM": "jaxinfer.textbook.branching.drafter",
    "Eagle3Forward": "jaxinfer.textbook.branching.eagle3_forward",
    "KVCache": "jaxinfer.textbook.branching.kv_cache",
    "ModelKVCache": "jaxinfer.textbook.branching.kv_cache",
    "decode_branches": "jaxinfer.textbook.branching.decode",
}


def __getattr__(name: str) -> Any:
    # Importing JAX takes most of a second, which a look at the names need not wait for.
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

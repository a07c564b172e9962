"""The names that users and the project's sources count on, where they are found."""

from __future__ import annotations

import importlib

import pytest

import jaxinfer

EXPORTED = {
    "LLM", "AsyncLLM", "BeamSearchParams", "CompletionOutput", "DiffusionConfig", "RequestOutput", "SamplingParams",
    "SpeculativeConfig", "StructuredOutputsParams", "__version__",
}  # fmt: skip

PUBLIC = {
    "jaxinfer.async_llm": ("AsyncLLM", "EngineDeadError", "RequestStream"),
    "jaxinfer.branching.beam_search": ("BeamSearchParams",),
    "jaxinfer.branching.branch_state": ("BranchStateManager",),
    "jaxinfer.cache.prefix_cache": ("PrefixCache", "PrefixCacheConfig", "PrefixCacheStats", "PrefixMatchResult"),
    "jaxinfer.cache.radix_tree": ("RadixTree",),
    "jaxinfer.checkpoint": ("convert_checkpoint", "export_hf", "load_checkpoint", "load_head", "read_config"),
    "jaxinfer.diffusion": ("DiffusionWorker",),
    "jaxinfer.engine.core": ("EngineCore",),
    "jaxinfer.frontend.client": ("EngineClient",),
    "jaxinfer.outputs": ("BeamSearchOutput", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
    "jaxinfer.scheduling.request_queue": ("RequestQueue",),
    "jaxinfer.scheduling.scheduler": ("Scheduler",),
    "jaxinfer.scheduling.scheduler_output": ("CachedRequestData", "NewRequestData", "SchedulerOutput"),
    "jaxinfer.skeleton.answer": ("SkeletonEvent", "SkeletonOfThought", "SkeletonOutput"),
    "jaxinfer.textbook.alignment": ("AlignmentManager", "AlignmentState", "ContinuousDecodingState"),
    "jaxinfer.textbook.branching": (
        "AlignmentManager", "AlignmentState", "BranchForward", "BranchStateManager", "CachedForward",
        "ContinuousDecodingState", "DraftTrees", "DrafterBIM", "Eagle3Forward", "KVCache", "ModelKVCache",
        "decode_branches",
    ),
    "jaxinfer.textbook.diffusion.batch_state": ("DiffusionBatchState", "DiffusionBlockContext", "DiffusionBlockMeta"),
    "jaxinfer.textbook.diffusion.iteration": ("DiffusionIteration", "DiffusionIterationResult"),
    "jaxinfer.textbook.diffusion.worker": ("DiffusionWorker",),
    "jaxinfer.textbook.kv_view": ("KVCache",),
    "jaxinfer.textbook.prefix_cache": (
        "PrefixCache", "PrefixCacheConfig", "PrefixCacheManager", "PrefixCacheStats", "PrefixMatchResult",
        "RadixMatchResult", "RadixNode", "RadixTree",
    ),
    "jaxinfer.textbook.speculative.generate": (
        "autoregressive_generate", "beam_search_generate", "ngram_assisted_speculative_generate",
        "speculative_generate",
    ),
    "jaxinfer.textbook.speculative.logits_processors": (
        "GreedyProcessor", "MultinomialProcessor", "NucleusProcessor", "TopKNucleusProcessor", "TopKProcessor",
    ),
}  # fmt: skip


def test_the_package_exports_these_names_and_no_others():
    assert set(jaxinfer.__all__) == set(dir(jaxinfer)) == EXPORTED
    assert [name for name in EXPORTED if getattr(jaxinfer, name, None) is None] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_a_module_has_its_public_names(module):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []


def test_what_has_two_homes_is_one_object():
    for name, module in (("LLM", "jaxinfer.llm"), ("SpeculativeConfig", "jaxinfer.config")):
        assert getattr(jaxinfer, name) is getattr(importlib.import_module(module), name)

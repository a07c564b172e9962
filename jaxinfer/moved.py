"""Old module names, redirected to the modules that replaced them."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "jaxinfer.bench.engine_limits": "jaxinfer.cli.engine_limits",
    "jaxinfer.bench.latency": "jaxinfer.cli.latency",
    "jaxinfer.bench.options": "jaxinfer.cli.bench",
    "jaxinfer.bench.throughput": "jaxinfer.cli.throughput",
    "jaxinfer.branching.alignment": "jaxinfer.textbook.alignment",
    "jaxinfer.branching.automaton": "jaxinfer.constraints.automaton",
    "jaxinfer.branching.kv_view": "jaxinfer.textbook.kv_view",
    "jaxinfer.branching.skeleton": "jaxinfer.skeleton.plan",
    "jaxinfer.branching.skeleton_grammar": "jaxinfer.skeleton.grammar",
    "jaxinfer.branching.skeleton_prompts": "jaxinfer.skeleton.prompts",
    "jaxinfer.config_field_options": "jaxinfer.cli.config_field_options",
    "jaxinfer.diffusion.batch_state": "jaxinfer.textbook.diffusion.batch_state",
    "jaxinfer.diffusion.batches": "jaxinfer.textbook.diffusion.batches",
    "jaxinfer.diffusion.iteration": "jaxinfer.textbook.diffusion.iteration",
    "jaxinfer.diffusion.sequence_rows": "jaxinfer.textbook.diffusion.sequence_rows",
    "jaxinfer.diffusion.watched_rounds": "jaxinfer.textbook.diffusion.watched_rounds",
    "jaxinfer.diffusion.worker": "jaxinfer.textbook.diffusion.worker",
    "jaxinfer.cache.kv_cache": "jaxinfer.cache.kv_pool",
    "jaxinfer.drafters": "jaxinfer.strategies.drafters",
    "jaxinfer.engine.beam_search": "jaxinfer.strategies.beams",
    "jaxinfer.engine.bidirectional": "jaxinfer.strategies.bidirectional",
    "jaxinfer.engine.denoisers": "jaxinfer.strategies.choose",
    "jaxinfer.engine.denoising": "jaxinfer.strategies.block_diffusion",
    "jaxinfer.engine.detokenizer": "jaxinfer.frontend.detokenizer",
    "jaxinfer.engine.diffusion_strategy": "jaxinfer.strategies.diffusion",
    "jaxinfer.engine.drafter_lanes": "jaxinfer.strategies.drafter_lanes",
    "jaxinfer.engine.kv_cache_manager": "jaxinfer.scheduling.kv_cache_manager",
    "jaxinfer.engine.landing": "jaxinfer.scheduling.landing",
    "jaxinfer.engine.launch_plan": "jaxinfer.scheduling.launch_plan",
    "jaxinfer.engine.launch_timing": "jaxinfer.strategies.launch_timing",
    "jaxinfer.engine.memory": "jaxinfer.memory.budget",
    "jaxinfer.engine.memory_share": "jaxinfer.memory.share",
    "jaxinfer.engine.output_processor": "jaxinfer.frontend.output_processor",
    "jaxinfer.engine.pace": "jaxinfer.scheduling.pace",
    "jaxinfer.engine.plan_rounds": "jaxinfer.scheduling.plan_rounds",
    "jaxinfer.engine.request": "jaxinfer.scheduling.request",
    "jaxinfer.engine.request_group": "jaxinfer.scheduling.request_group",
    "jaxinfer.engine.request_queue": "jaxinfer.scheduling.request_queue",
    "jaxinfer.engine.rounds": "jaxinfer.scheduling.rounds",
    "jaxinfer.engine.scheduler": "jaxinfer.scheduling.scheduler",
    "jaxinfer.engine.scheduler_output": "jaxinfer.scheduling.scheduler_output",
    "jaxinfer.engine.speculation": "jaxinfer.strategies.speculation",
    "jaxinfer.engine.speculator": "jaxinfer.strategies.speculator",
    "jaxinfer.engine.trunks": "jaxinfer.scheduling.trunks",
    "jaxinfer.engine.waiting_room": "jaxinfer.scheduling.waiting_room",
    "jaxinfer.engine.whole_scheduler": "jaxinfer.scheduling.whole_scheduler",
    "jaxinfer.input_processor": "jaxinfer.frontend.input_processor",
    "jaxinfer.models.bailing": "jaxinfer.models.registry",
    "jaxinfer.models.llada": "jaxinfer.models.registry",
    "jaxinfer.models.llada2": "jaxinfer.models.registry",
    "jaxinfer.models.llama": "jaxinfer.models.registry",
    "jaxinfer.models.qwen2": "jaxinfer.models.registry",
    "jaxinfer.models.qwen3": "jaxinfer.models.registry",
    "jaxinfer.models.qwen3_moe": "jaxinfer.models.registry",
    "jaxinfer.models.sdar": "jaxinfer.models.registry",
    "jaxinfer.planning.command": "jaxinfer.cli.plan_command",
    "jaxinfer.planning.options": "jaxinfer.cli.plan",
    "jaxinfer.progress": "jaxinfer.frontend.progress",
    "jaxinfer.prompts": "jaxinfer.frontend.prompts",
    "jaxinfer.show_denoising": "jaxinfer.cli.show_denoising",
    "jaxinfer.show_drafts": "jaxinfer.cli.show_drafts",
    "jaxinfer.skeleton_of_thought": "jaxinfer.skeleton.answer",
    "jaxinfer.speculative.classic": "jaxinfer.textbook.speculative",
    "jaxinfer.speculative.classic.beam_search": "jaxinfer.textbook.speculative.beam_search",
    "jaxinfer.speculative.classic.cached_decoder": "jaxinfer.textbook.speculative.cached_decoder",
    "jaxinfer.speculative.classic.chain_drafters": "jaxinfer.textbook.speculative.chain_drafters",
    "jaxinfer.speculative.classic.chain_loop": "jaxinfer.textbook.speculative.chain_loop",
    "jaxinfer.speculative.classic.classic_rule": "jaxinfer.textbook.speculative.classic_rule",
    "jaxinfer.speculative.classic.language_model": "jaxinfer.textbook.speculative.language_model",
    "jaxinfer.speculative.classic.logits_processors": "jaxinfer.textbook.speculative.logits_processors",
    "jaxinfer.speculative.classic.ngram_storage": "jaxinfer.textbook.speculative.ngram_storage",
    "jaxinfer.speculative.classic.random_streams": "jaxinfer.textbook.speculative.random_streams",
    "jaxinfer.speculative.classic.step_view": "jaxinfer.textbook.speculative.step_view",
    "jaxinfer.speculative.generate": "jaxinfer.textbook.speculative.generate",
    "jaxinfer.speculative_options": "jaxinfer.cli.speculative_options",
}


class _Redirect(Loader):
    """Loader that imports the new module under the old name."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} has moved to {MOVED[old]}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])


class MovedFinder(MetaPathFinder):
    """Finder of modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Redirect()) if fullname in MOVED else None


def install() -> None:
    """Let imports by old names work in this process."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        # First, because other finders would load the files of a moved package again, under the old name.
        sys.meta_path.insert(0, MovedFinder())

"""A batch for the textbook worker, ways to denoise it, and both the worker's and the loop's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.diffusion.batches import ForwardBatch, ModelWorkerBatch
from jaxinfer.textbook.diffusion.iteration import DiffusionBatchState, DiffusionIteration
from jaxinfer.textbook.diffusion.worker import DiffusionWorker
from tests.builders import random_prompts
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.builders import MASK
from tests.diffusion.oracle import by_threshold
from tests.sampling.reference import Filters
from tests.tolerances import tolerance

BLOCK, THRESHOLD = 6, 0.25
PLAIN = {"cont_weight": 0.0}
SMOOTH = {"warmup_steps": 3, "threshold_decay": 0.2}
DUAL = {"cache": "dual"}
VICINITY = {"cache": "dual", "prefix_look": 5, "after_look": 3}
PREFIX = {"cache": "prefix", "prefix_look": 2}
WAYS = {
    "dual": {**DUAL, **PLAIN},
    "dual smoothed": {**DUAL, **SMOOTH},
    "vicinity": {**VICINITY, **PLAIN},
    "vicinity smoothed": {**VICINITY, **SMOOTH},
    "prefix smoothed": {**PREFIX, **SMOOTH},
    "no cache, credit": {"cache": "none", "unmask": "credit", **PLAIN},
}
PROMPTS = random_prompts((30, 7, 19), vocab_size=MASK)
# The second is sampled; the blocks of no two of them end together, and the last ones are shorter.
MAX_NEW_TOKENS, TEMPERATURE, SEEDS = [20, 17, 9], [0.0, 0.5, 0.0], [0, 5, 2]


def settings(**more: Any) -> dict[str, Any]:
    return {"block_size": BLOCK, "threshold": THRESHOLD, "expected_tpf": 2, "page_size": 8, **more}


def worker_of(model: DecoderLM, server_args: Any = None, **more: Any) -> DiffusionWorker:
    return DiffusionWorker(server_args, None, model=model, **settings(**more))


def batch_of(eos: tuple[int, ...] = (), **more: Any) -> ModelWorkerBatch:
    given = {"input_ids": PROMPTS, "max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE, "seeds": SEEDS}
    return ModelWorkerBatch(**{**given, "eos_token_ids": eos, **more})


def decoded(
    model: DecoderLM,
    way: dict[str, Any],
    eos: tuple[int, ...] = (),
    filters: Sequence[Filters] = tuple(map(Filters, TEMPERATURE)),
    bug: str = "",
) -> list[loop.Decoded]:
    """What the loop makes of the batch."""
    smooth = None if way.get("cont_weight") == 0 else loop.Smooth(way["warmup_steps"], threshold_decay=0.2)
    return [
        loop.generate(
            model, prompt, count, block_size=BLOCK, rule=by_threshold, threshold=THRESHOLD, cache=way["cache"],
            prefix_look=way.get("prefix_look", 0), after_look=way.get("after_look", 0), smooth=smooth, eos=eos,
            filters=each, request_key=(0, seed), credit=loop.Credit() if "unmask" in way else None, bug=bug,
        )
        for prompt, count, each, seed in zip(PROMPTS, MAX_NEW_TOKENS, filters, SEEDS, strict=True)
    ]  # fmt: skip


def drive(worker: DiffusionWorker, batch: Any) -> tuple[list[list[int]], DiffusionBatchState]:
    """All that a worker gives for a batch, call by call."""
    state = worker.prefill(batch).batch_state
    tokens: list[list[int]] = [[] for _ in state.canvas]
    while not state.is_finished:
        for known, more in zip(tokens, worker.extend(batch, state).next_token_ids, strict=True):
            assert len(more) <= BLOCK
            known += more
    return tokens, state


def check_iterations(
    iteration: DiffusionIteration, batch: ForwardBatch, state: DiffusionBatchState, wanted: list[loop.Decoded]
) -> None:
    """Run a batch iteration by iteration and compare each with the loop's round.

    Raises:
        AssertionError: a weight, a threshold, what is computed, a token or a logit is another one.
    """
    for block in state.block_windows:
        rounds = [each for each in wanted[block.req_index].rounds if each.block == block.start]
        assert rounds
        for each in rounds:
            context = iteration.prepare_block(batch, state, block)
            np.testing.assert_allclose((context.weight, context.threshold), (each.weight, each.threshold), rtol=1e-6)
            assert context.has_cache == (each.kind == "window") and context.block_id == block.block_id
            number = state.iteration_counters[block.req_index]
            result = iteration.run_iteration_step(batch, state, block, number)
            logits = np.asarray(result.logits)
            assert logits.shape == (block.end - block.start, iteration.model.config.vocab_size)
            assert not np.any(np.isfinite(logits[:, MASK]))
            np.testing.assert_allclose(logits, each.logits, atol=tolerance(2e-4))
            assert tuple(state.canvas[block.req_index]) == each.tokens
            assert result.iterations_used == 1 and result.block_finished == (each is rounds[-1])
        number = state.iteration_counters[block.req_index]
        assert iteration.run_iteration_step(batch, state, block, number).iterations_used == 0
        iteration.finalize_block(batch, state, block)
    assert state.output_ids == [found.tokens for found in wanted] and state.is_finished

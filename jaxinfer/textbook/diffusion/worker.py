"""A worker that denoises batches for a script: the source's `DiffusionWorker`, for bidirectional models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.diffusion.vicinity import BLOCK_SIZE
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.diffusion.batch_state import DiffusionBatchState
from jaxinfer.textbook.diffusion.batches import ForwardBatch
from jaxinfer.textbook.diffusion.iteration import DiffusionIteration


@dataclass
class GenerationBatchResult:
    """Result of a worker's call for R requests."""

    logits_output: jax.Array  # float32 [R, B, vocab], of each block's latest iteration
    next_token_ids: list[list[int]]  # tokens of each request that became final
    batch_state: DiffusionBatchState
    iterations: list[int]  # forwards that each request took


class DiffusionWorker:
    """Worker that drives a `DiffusionIteration` from block to block.

    `prefill` begins a batch. Each call of `extend` denoises one block of every request that has one left.

    Args:
        server_args, model_config: any objects, or None. `hidden_size` and `block_size` are read from `model_config`, or
            else from `server_args`; `model_path` and the sizes of parallel groups are read from `server_args`.
        gpu_id, tp_rank, pp_rank, moe_ep_rank: must be 0.
        graph_runner, enable_cuda_graph_sampling: must be None and False.
        model: a bidirectional diffusion model; None: the checkpoint at `server_args.model_path`.
        settings: of the `DiffusionIteration`; they override the two objects.

    Raises:
        ValueError: a rank, a group size or a setting is not supported, which the message names; or there is no model.
        FileNotFoundError, CheckpointError, UnsupportedConfigError: as for `load_checkpoint`.
    """

    def __init__(
        self,
        server_args: Any,
        model_config: Any,
        gpu_id: int = 0,
        tp_rank: int = 0,
        pp_rank: int = 0,
        moe_ep_rank: int = 0,
        graph_runner: Any = None,
        enable_cuda_graph_sampling: bool = False,
        *,
        model: DecoderLM | None = None,
        **settings: Any,
    ) -> None:
        ranks = {"gpu_id": gpu_id, "tp_rank": tp_rank, "pp_rank": pp_rank, "moe_ep_rank": moe_ep_rank}
        for name, value in ranks.items():
            if value != 0:
                raise ValueError(f"{name} must be 0, got {value!r}: one worker computes the whole model")
        for name in ("tp_size", "pp_size", "ep_size"):
            if getattr(server_args, name, 1) != 1:
                raise ValueError(f"{name} must be 1, got {getattr(server_args, name)!r}: one worker is all there is")
        if enable_cuda_graph_sampling:
            raise ValueError("enable_cuda_graph_sampling must be False: XLA draws tokens in the program of the forward")
        if model is None:
            path = getattr(server_args, "model_path", None)
            if path is None:
                raise ValueError("model is None, and server_args has no model_path to load one from")
            _, model = load_checkpoint(path)
        read = {"hidden_size": model.config.hidden_size, "block_size": BLOCK_SIZE}
        for name in read:
            given = [getattr(each, name, None) for each in (model_config, server_args)]
            read[name] = next((value for value in given if value is not None), read[name])
        self.model = model
        self.iteration = DiffusionIteration(model, **{**read, "graph_runner": graph_runner, **settings})

    def prefill(self, model_worker_batch: Any) -> GenerationBatchResult:
        """Begin a batch with the first iteration of each request. No token is final before its block is finished.

        Args:
            model_worker_batch: a `ModelWorkerBatch`, or an object with its attributes.

        Raises:
            ValueError: as for `ForwardBatch.init_new` and `DiffusionIteration.allocate_prefill_state`.
        """
        batch = self._create_forward_batch(model_worker_batch)
        state = self.iteration.allocate_prefill_state(batch)
        logits = self.iteration.run_prefill_forward(batch, state)
        return GenerationBatchResult(logits, [[] for _ in batch.input_ids], state, list(state.iteration_counters))

    def extend(self, model_worker_batch: Any, batch_state: DiffusionBatchState) -> GenerationBatchResult:
        """Denoise the current block of each request; requests that have ended get nothing.

        Args:
            model_worker_batch: of the same requests in the same order. Sampling parameters and ending tokens are taken
                from it; prompts and lengths are not read again.
            batch_state: from `prefill` or `DiffusionIteration.allocate_prefill_state`.

        Raises:
            ValueError: as for `ForwardBatch.init_new`; the batch has another number of requests than the state; or all
                requests have ended.
        """
        batch, steps = self._create_forward_batch(model_worker_batch), self.iteration
        blocks = batch_state.current_blocks()
        if not blocks:
            raise ValueError("all requests of the batch have ended")
        tokens_before = [len(tokens) for tokens in batch_state.output_ids]
        iterations_before = list(batch_state.iteration_counters)
        left = blocks
        while left:
            steps.run_iterations(batch, batch_state, left)
            left = [block for block in left if batch_state.contexts[block.req_index].mask.any()]
        for block in blocks:
            steps.finalize_block(batch, batch_state, block)
        assert batch_state.cached_logits is not None
        return GenerationBatchResult(
            batch_state.cached_logits[: batch.batch_size],
            [tokens[first:] for tokens, first in zip(batch_state.output_ids, tokens_before, strict=True)],
            batch_state,
            [now - then for now, then in zip(batch_state.iteration_counters, iterations_before, strict=True)],
        )

    def _create_forward_batch(self, model_worker_batch: Any) -> ForwardBatch:
        return ForwardBatch.init_new(model_worker_batch, self)

"""A worker that denoises batches for a script: the source's `DiffusionWorker`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.tensor_parallel import make_mesh
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.diffusion.drawing import Places, sample_places
from jaxinfer.diffusion.vicinity import BLOCK_SIZE
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.sampler import SamplingBatch
from jaxinfer.textbook.diffusion.batch_state import DiffusionBatchState
from jaxinfer.textbook.diffusion.batches import ForwardBatch
from jaxinfer.textbook.diffusion.iteration import DiffusionIteration
from jaxinfer.textbook.diffusion.placement import mesh_of, over_mesh


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
            else from `server_args`; by default they are the model's, and 32 for a model without trained blocks.
            `model_path` and the sizes of parallel groups are read from `server_args`: `tp_size` devices share every
            layer.
        gpu_id, tp_rank, pp_rank, moe_ep_rank: must be 0 or None: one worker drives all devices.
        graph_runner, enable_cuda_graph_sampling: must be None and False.
        model: a diffusion model, see `DiffusionIteration`; None: the checkpoint at `server_args.model_path`.
        settings: of the `DiffusionIteration`; they override the two objects.

    Raises:
        ValueError: a rank, a group size or a setting is not supported, which the message names; the devices cannot
            share the model evenly; or there is no model.
        FileNotFoundError, CheckpointError, UnsupportedConfigError: as for `load_checkpoint`.
    """

    def __init__(
        self,
        server_args: Any,
        model_config: Any,
        gpu_id: int | None = 0,
        tp_rank: int | None = 0,
        pp_rank: int | None = 0,
        moe_ep_rank: int | None = 0,
        graph_runner: Any = None,
        enable_cuda_graph_sampling: bool = False,
        *,
        model: DecoderLM | None = None,
        **settings: Any,
    ) -> None:
        ranks = {"gpu_id": gpu_id, "tp_rank": tp_rank, "pp_rank": pp_rank, "moe_ep_rank": moe_ep_rank}
        for name, value in ranks.items():
            if value not in (None, 0):
                raise ValueError(f"{name} must be 0, got {value!r}: one worker computes the whole model")
        for name in ("pp_size", "ep_size"):
            if getattr(server_args, name, None) not in (None, 0, 1):
                raise ValueError(
                    f"{name} must be 1, got {getattr(server_args, name)!r}: devices share each layer, by tp_size"
                )
        if enable_cuda_graph_sampling:
            raise ValueError("enable_cuda_graph_sampling must be False: XLA draws tokens in the program of the forward")
        model = _model_of(server_args, model)
        block_size = model.config.block_size or BLOCK_SIZE
        read = {"hidden_size": model.config.hidden_size, "block_size": block_size}
        for name in read:
            given = [getattr(each, name, None) for each in (model_config, server_args)]
            read[name] = next((value for value in given if value is not None), read[name])
        self.iteration = DiffusionIteration(model, **{**read, "graph_runner": graph_runner, **settings})
        self.model = self.iteration.model

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

    def _sample(self, logits_output: Any, forward_batch: ForwardBatch) -> jax.Array:
        """Draw a token from each row of logits with its request's temperature, top-p, top-k and seed; never the mask.

        The noise of place i is that of the sequence's first round at i tokens after its prompt: from the logits of
        `prefill`, these are the tokens that the round itself drew. `prefill` and `extend` do not call this: a round
        draws within its program, since it commits tokens by their probabilities.

        Args:
            logits_output: float32 [R, vocab] or [R, B, vocab], or an object with them as `next_token_logits`.
            forward_batch: of R requests.

        Returns:
            int32 [R] or [R, B]; `NO_SCORE` in place of a token where nothing can be drawn, for logits that are NaN.

        Raises:
            ValueError: the logits have another shape.
        """
        config, rows = self.model.config, forward_batch.batch_size
        logits = jnp.asarray(getattr(logits_output, "next_token_logits", logits_output), jnp.float32)
        if logits.ndim not in (2, 3) or (logits.shape[0], logits.shape[-1]) != (rows, config.vocab_size):
            wanted = f"[{rows}, {config.vocab_size}] or [{rows}, B, {config.vocab_size}]"
            raise ValueError(f"logits_output must have the shape {wanted}, got {list(logits.shape)}")
        size = 1 if logits.ndim == 2 else logits.shape[1]
        start = np.asarray([len(prompt) for prompt in forward_batch.input_ids], np.int32)
        places = Places(jnp.asarray(start), jnp.zeros(rows, jnp.int32), jnp.ones((rows, size), bool))
        sampling = SamplingBatch(
            temperature=jnp.asarray(forward_batch.temperature, jnp.float32),
            top_k=jnp.asarray(forward_batch.top_k, jnp.int32),
            top_p=jnp.asarray(forward_batch.top_p, jnp.float32),
            min_p=jnp.zeros(rows, jnp.float32),
            request_key=jnp.asarray(forward_batch.request_keys, jnp.uint32),
            sample_position=jnp.zeros(rows, jnp.int32),
        )
        is_mask = jnp.arange(config.vocab_size) == config.mask_token_id
        flat = jnp.where(is_mask, -jnp.inf, logits.reshape(-1, config.vocab_size))
        return _sample_places(places, flat, sampling).reshape(logits.shape[:-1])


_sample_places = jax.jit(sample_places)


def _model_of(server_args: Any, model: DecoderLM | None) -> DecoderLM:
    """Return the given model, or the one that `server_args` names, over as many devices as it says."""
    tp_size = getattr(server_args, "tp_size", None)
    mesh = None if tp_size is None else make_mesh("tp_size", tp_size)
    if model is None:
        path = getattr(server_args, "model_path", None)
        if path is None:
            raise ValueError("model is None, and server_args has no model_path to load one from")
        return load_checkpoint(path, mesh=mesh)[1]
    there = mesh_of(model)
    if tp_size is None or tp_size == (1 if there is None else there.size):
        return model
    if there is not None:
        raise ValueError(f"tp_size must be {there.size}, over which the model is sharded, or absent, got {tp_size}")
    assert mesh is not None
    return over_mesh(model, mesh)

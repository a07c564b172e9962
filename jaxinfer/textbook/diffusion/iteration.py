"""Denoising iterations for scripts: the source's `DiffusionIteration` (dInfer's `IterSmoothWithVicinityCache`), built
from the rounds of the engine's programs for bidirectional models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.diffusion.canvas import CANVAS
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.vicinity import vicinity_of
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.families import FAMILIES
from jaxinfer.programs.program import KV
from jaxinfer.textbook.diffusion.batch_state import (
    DiffusionBatchState,
    DiffusionBlockContext,
    DiffusionBlockMeta,
    begin_batch,
)
from jaxinfer.textbook.diffusion.batches import ForwardBatch
from jaxinfer.textbook.diffusion.placement import placed
from jaxinfer.textbook.diffusion.sequence_rows import Pool, SequenceRow, SequenceRows
from jaxinfer.textbook.diffusion.watched_rounds import watched_rounds


@dataclass
class DiffusionIterationResult:
    """Result of an iteration of a block.

    Attributes:
        logits: float32 [end - start, vocab], from which its tokens were drawn; the mask token is excluded.
        block_finished: whether no mask is left; `finalize_block` comes next then.
        iterations_used: forwards that the call took; 0 if no mask was left before it.
    """

    logits: jax.Array
    block_finished: bool
    iterations_used: int


class DiffusionIteration:
    """Denoiser of blocks of a diffusion model's sequences, whose tokens all see each other.

    Blocks start where the prompt ends. A block-causal model (LLaDA2, SDAR) runs without the mask of its blocks, like a
    bidirectional one: the source runs it so, the engine does not.

    An iteration is one forward pass and the tokens that it commits. It computes the whole sequence if its KV was not
    computed for this block yet (or during the warm-up), else a window around the block. `batch_state` holds the whole
    state of a batch, so any number of batches can be denoised in turn.

    Args:
        model: a diffusion model: LLaDA, LLaDA-MoE, LLaDA2 or SDAR. If its parameters are sharded over a mesh with an
            axis "tensor", its devices compute every iteration together.
        hidden_size: the model's.
        block_size: tokens that are denoised together.
        maximum_unroll, expected_tpf: `run_iterations` runs as many iterations in a launch as the remaining masks take
            at `expected_tpf` tokens each, and at most `maximum_unroll`. They change no token.
        warmup_steps, cont_weight, cont_weight_init, cont_weight_growth, threshold_decay, threshold, prefix_look,
            after_look, cache, unmask, low_threshold, factor, credit_alpha, boost_gamma, decay_beta: see
            `DiffusionConfig`; a `cont_weight` of 0 turns smoothing off.
        graph_runner: must be None: XLA makes one program of a launch.
        device: device of the parameters and of the state of batches: "cpu", "gpu", "cuda:0" or a `jax.Device`; None:
            the parameters stay where they are.
        page_size: of the KV pool.

    Attributes:
        model: the model on its devices.

    Raises:
        ValueError: the model is of another kind; a setting is out of range, or `hidden_size` is not the model's; a
            graph runner is given; or there is no such device.
    """

    def __init__(
        self,
        model: DecoderLM,
        hidden_size: int,
        block_size: int,
        maximum_unroll: int = 4,
        expected_tpf: int = 8,
        warmup_steps: int = 0,
        cont_weight: float = 0.3,
        cont_weight_init: float = 0.15,
        cont_weight_growth: float = 0.02,
        threshold_decay: float = 0.02,
        graph_runner: Any = None,
        device: Any = None,
        *,
        threshold: float = 0.9,
        prefix_look: int = 0,
        after_look: int = 0,
        cache: str = "dual",
        unmask: str = "threshold",
        low_threshold: float = 0.4,
        factor: float = 1.0,
        credit_alpha: float = 0.7,
        boost_gamma: float = 0.2,
        decay_beta: float = 0.8,
        page_size: int = 16,
    ) -> None:
        if graph_runner is not None:
            raise ValueError("graph_runner must be None: XLA makes one program of a launch, there is nothing to record")
        if model.config.mask_token_id is None:
            allowed = ", ".join(name for name, family in FAMILIES.items() if family.is_diffusion)
            raise ValueError(
                f"model is a {model.config.architecture}, which is no bidirectional diffusion model, nor a "
                "block-causal one: it has no mask token, and its causal weights, trained to predict the next token, do "
                f"not denoise; allowed are {allowed}"
            )
        if hidden_size != model.config.hidden_size:
            raise ValueError(f"hidden_size must be the model's, {model.config.hidden_size}, got {hidden_size!r}")
        check_positive_integer("page_size", page_size)
        self.config = DiffusionConfig(
            block_size=block_size, threshold=threshold, unmask=unmask, low_threshold=low_threshold, factor=factor,
            credit_alpha=credit_alpha, boost_gamma=boost_gamma, decay_beta=decay_beta, cache=cache,
            prefix_look=prefix_look, after_look=after_look, cont_weight=cont_weight, cont_weight_init=cont_weight_init,
            cont_weight_growth=cont_weight_growth, threshold_decay=threshold_decay, warmup_steps=warmup_steps,
            maximum_unroll=maximum_unroll, expected_tpf=expected_tpf,
        )  # fmt: skip
        self.model, self._placement = placed(model, device)
        self.page_size, self.vicinity = page_size, vicinity_of(self.config, model.config)
        self._launch = watched_rounds(self.model, self.vicinity, self._placement, maximum_unroll)

    def allocate_prefill_state(self, forward_batch: ForwardBatch) -> DiffusionBatchState:
        """Return the state of a batch before its first iteration: canvases of prompts and masks, their blocks, and room
        for KV.

        Raises:
            ValueError: a prompt is empty, has masks or ids outside the vocabulary, or its sequence exceeds the model's
                positions.
        """
        return begin_batch(forward_batch, self.model, self.vicinity, self.page_size, self._placement)

    def run_prefill_forward(self, forward_batch: ForwardBatch, batch_state: DiffusionBatchState) -> jax.Array:
        """Run the first iteration of all sequences, which computes them whole; like any other it commits tokens.

        Returns:
            float32 [R, B, vocab], the logits of their first blocks.

        Raises:
            ValueError: the batch has had iterations, or has another number of requests.
        """
        if any(batch_state.iteration_counters):
            raise ValueError("the batch has been prefilled: its sequences have had iterations")
        self.run_iterations(forward_batch, batch_state, batch_state.current_blocks())
        assert batch_state.cached_logits is not None
        return batch_state.cached_logits[: forward_batch.batch_size]

    def prepare_block(
        self, forward_batch: ForwardBatch, batch_state: DiffusionBatchState, block_meta: DiffusionBlockMeta
    ) -> DiffusionBlockContext:
        """Return the state of a block before its next iteration, and note it in `batch_state.contexts`. Idempotent.

        Raises:
            ValueError: the block is finished, or one before it is not.
        """
        index, number = block_meta.req_index, block_meta.block_id
        first = next((block for block in batch_state.blocks_of(index) if not block.is_finished), None)
        if first is None or first.block_id != number:
            turn = "it has ended" if first is None else f"it is at block {first.block_id}"
            raise ValueError(f"block {number} of request {index} cannot be denoised: {turn}")
        known, smoothing = batch_state.contexts.get(index), self.vicinity.smoothing
        iteration = batch_state.iteration_counters[index]
        threshold, weight = self.config.threshold, 0.0
        if smoothing is not None:
            threshold = max(threshold, float(smoothing.least_threshold(iteration)))
            weight = float(smoothing.weight(iteration))
        context = DiffusionBlockContext(
            number,
            np.asarray(batch_state.tokens_of(first)) == self.vicinity.mask_token_id,
            threshold,
            iteration,
            weight,
            known is not None and known.block_id == number and known.has_cache,
        )
        batch_state.contexts[index] = context
        return context

    def run_iteration_step(
        self,
        forward_batch: ForwardBatch,
        batch_state: DiffusionBatchState,
        block_meta: DiffusionBlockMeta,
        iter_no: int,
    ) -> DiffusionIterationResult:
        """Run one iteration of one block, if it has a mask.

        Args:
            iter_no: the iteration's number in the sequence. The threshold, the weight of smoothing, the warm-up and the
                noise of sampling depend on it. The sequence's counter continues from it; passing the counter itself
                gives the source's numbering.

        Raises:
            ValueError: as for `prepare_block`, or `iter_no` is negative.
        """
        if iter_no < 0:
            raise ValueError(f"iter_no must be 0 or more, got {iter_no}")
        index = block_meta.req_index
        if self.prepare_block(forward_batch, batch_state, block_meta).mask.any():
            batch_state.iteration_counters[index] = iter_no
        (used,) = self.run_iterations(forward_batch, batch_state, [block_meta], most=1)
        assert batch_state.cached_logits is not None
        logits = batch_state.cached_logits[index, : block_meta.end - block_meta.start]
        return DiffusionIterationResult(logits, not batch_state.contexts[index].mask.any(), used)

    def run_iterations(
        self,
        forward_batch: ForwardBatch,
        batch_state: DiffusionBatchState,
        block_metas: Sequence[DiffusionBlockMeta],
        *,
        most: int | None = None,
    ) -> list[int]:
        """Run iterations of blocks of different requests in batches: one iteration of those whose whole sequences must
        be computed, and one launch of windows. Returns the number of iterations of each block.

        Args:
            most: most iterations of a window; None: as `maximum_unroll` and `expected_tpf` say.

        Raises:
            ValueError: as for `prepare_block`; or the batch has another number of requests than the state.
        """
        if forward_batch.batch_size != len(batch_state.canvas):
            raise ValueError(f"a batch of {forward_batch.batch_size} for a state of {len(batch_state.canvas)} requests")
        before = list(batch_state.iteration_counters)
        wholes, windows = [], []
        for block in block_metas:
            context = self.prepare_block(forward_batch, batch_state, block)
            if context.mask.any():
                is_window = context.has_cache and self.vicinity.cache == "dual"
                (windows if is_window else wholes).append(block)
        if wholes:
            self._run(forward_batch, batch_state, wholes, 0)
        if windows:
            masks = max(int(batch_state.contexts[block.req_index].mask.sum()) for block in windows)
            unroll = max(1, min(masks // self.config.expected_tpf, self.config.maximum_unroll))
            self._run(forward_batch, batch_state, windows, unroll if most is None else most)
        return [batch_state.iteration_counters[block.req_index] - before[block.req_index] for block in block_metas]

    def finalize_block(
        self, forward_batch: ForwardBatch, batch_state: DiffusionBatchState, block_meta: DiffusionBlockMeta
    ) -> None:
        """Append a block without masks to its sequence's output. An ending token in it ends the output.

        Raises:
            ValueError: as for `prepare_block`, or the block has masks.
        """
        index = block_meta.req_index
        masks = int(self.prepare_block(forward_batch, batch_state, block_meta).mask.sum())
        if masks:
            raise ValueError(f"block {block_meta.block_id} of request {index} has {masks} masks left")
        tokens, ending = batch_state.tokens_of(block_meta), forward_batch.eos_token_ids
        end = next((place + 1 for place, token in enumerate(tokens) if token in ending), None)
        batch_state.output_ids[index] += tokens[:end]
        for block in batch_state.blocks_of(index):
            block.is_finished |= end is not None or block.block_id == block_meta.block_id
        block_meta.is_finished = True
        del batch_state.contexts[index]

    def _run(
        self, batch: ForwardBatch, state: DiffusionBatchState, blocks: list[DiffusionBlockMeta], most: int
    ) -> None:
        """Run one launch: `most` rounds of windows or, if that is 0, a round of whole sequences."""
        kv: KVPool = state.arrays[KV]
        seats = len(state.arrays[CANVAS].credits)
        packer = SequenceRows(Pool(seats, kv.num_pages // seats, kv.page_size), self.vicinity)
        rows = [
            SequenceRow(
                block.req_index, state.kv_handles[block.req_index], state.canvas[block.req_index],
                state.blocks_of(block.req_index)[0].start, block.start, state.iteration_counters[block.req_index],
                batch.temperature[block.req_index], batch.request_keys[block.req_index],
                batch.top_p[block.req_index], batch.top_k[block.req_index],
            )
            for block in blocks
        ]  # fmt: skip
        if most:
            packed, begins = packer.windows(rows, most)
        else:
            packed, begins = packer.rests(rows, [self._num_stored(state, block) for block in blocks])
        logits = state.cached_logits
        if logits is None:
            shape = seats, self.vicinity.block_size, self.model.config.vocab_size
            logits = jnp.zeros(shape, jnp.float32, device=self._placement.whole)
        state.arrays, found, state.cached_logits = self._launch(
            state.arrays, logits, packed.buffer, begins, shape=packed.shape
        )
        ran, tokens = np.asarray(found.ran), np.asarray(found.blocks)
        for row, block in enumerate(blocks):
            index, rounds = block.req_index, np.flatnonzero(ran[:, row])
            state.put(block, tokens[rounds[-1], row].tolist())
            refreshes = not most and self.vicinity.refreshes(state.iteration_counters[index])
            state.contexts[index].has_cache |= refreshes
            state.iteration_counters[index] += len(rounds)
            self.prepare_block(batch, state, block)

    def _num_stored(self, state: DiffusionBatchState, block: DiffusionBlockMeta) -> int:
        """Return the number of a sequence's first tokens that a round of whole sequences does not compute."""
        if self.vicinity.cache == "prefix" and state.contexts[block.req_index].has_cache:
            return max(0, block.start - self.vicinity.prefix_look)
        return 0

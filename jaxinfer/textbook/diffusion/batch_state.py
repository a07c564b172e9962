"""State of a batch of sequences between the calls of a diffusion iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.diffusion.canvas import CANVAS, Canvas
from jaxinfer.diffusion.drawing import keeps_credits
from jaxinfer.diffusion.vicinity import Vicinity
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.program import KV
from jaxinfer.textbook.diffusion.batches import ForwardBatch
from jaxinfer.textbook.diffusion.placement import Placement
from jaxinfer.textbook.diffusion.sequence_rows import Pool, rounded_up


@dataclass
class DiffusionBlockMeta:
    """Block `block_id` of a request: positions [start, end) of its sequence, prompt included."""

    req_index: int
    block_id: int
    start: int
    end: int
    is_finished: bool = False  # its tokens are final, or its sequence has ended before it


@dataclass
class DiffusionBlockContext:
    """State of a block before its next iteration."""

    block_id: int
    mask: np.ndarray  # bool [end - start], positions that have no token yet
    threshold: float  # of the next iteration, where the rule has one
    iteration: int  # number of the next iteration in the sequence
    weight: float  # of the vectors that are added to masks' embeddings after that iteration
    has_cache: bool = False  # whether the KV was computed while the sequence was at this block


@dataclass
class DiffusionBatchState:
    """R requests, whose blocks have up to B tokens, in S >= R seats."""

    prompt_embeddings: jax.Array  # [R, longest prompt, hidden], 0 after the end of a prompt
    block_windows: list[DiffusionBlockMeta]  # blocks of all requests, in order for each request
    kv_handles: list[list[int]]  # pages of each request in the pool
    iteration_counters: list[int]  # iterations that each request has had
    cached_logits: jax.Array | None = None  # float32 [S, B, vocab], of each block's latest iteration, without the mask
    canvas: list[list[int]] = field(default_factory=list)  # all tokens of each request, masks included
    output_ids: list[list[int]] = field(default_factory=list)  # tokens of each request's finished blocks
    contexts: dict[int, DiffusionBlockContext] = field(default_factory=dict)  # of requests that are in a block
    arrays: dict[str, Any] = field(default_factory=dict)  # on the device: the KV pool and the canvas

    @property
    def is_finished(self) -> bool:
        return all(block.is_finished for block in self.block_windows)

    def blocks_of(self, req_index: int) -> list[DiffusionBlockMeta]:
        return [block for block in self.block_windows if block.req_index == req_index]

    def current_blocks(self) -> list[DiffusionBlockMeta]:
        """Return the first unfinished block of each request that has one."""
        found: dict[int, DiffusionBlockMeta] = {}
        for block in self.block_windows:
            if not block.is_finished:
                found.setdefault(block.req_index, block)
        return list(found.values())

    def tokens_of(self, block: DiffusionBlockMeta) -> list[int]:
        """Return the tokens of a block, masks included."""
        return self.canvas[block.req_index][block.start : block.end]

    def put(self, block: DiffusionBlockMeta, tokens: Sequence[int]) -> None:
        """Set the tokens [B] of a block; positions beyond the end of its sequence are left out."""
        self.canvas[block.req_index][block.start : block.end] = tokens[: block.end - block.start]


def begin_batch(
    batch: ForwardBatch, model: DecoderLM, vicinity: Vicinity, page_size: int, placement: Placement
) -> DiffusionBatchState:
    """Return the state of a batch before its first iteration, with its arrays where `placement` says.

    Raises:
        ValueError: a prompt is empty, has masks or ids outside the vocabulary, or its sequence exceeds the model's
            positions.
    """
    prompts, size, config = batch.input_ids, vicinity.block_size, model.config
    totals = [len(prompt) + more for prompt, more in zip(prompts, batch.max_new_tokens, strict=True)]
    for index, (prompt, total) in enumerate(zip(prompts, totals, strict=True)):
        _check(index, prompt, total, config)
    # Each size of arrays compiles programs of its own, so they are rounded up to few sizes.
    pool = Pool(rounded_up(len(prompts), 1), rounded_up(-(-max(totals) // page_size), 1), page_size)
    length = 0 if vicinity.smoothing is None else pool.pages_per_seat * page_size
    kv = KVPool.allocate(
        config, num_pages=pool.num_pages, page_size=page_size, dtype=model.dtype, sharding=placement.pages
    )
    canvas = Canvas.allocate(
        pool.num_seats, length, size, config.hidden_size, config.vocab_size, model.dtype,
        placement.whole, with_credits=keeps_credits(vicinity.rule),
    )  # fmt: skip
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    there = np.arange(ids.shape[1]) < np.array([[len(prompt)] for prompt in prompts])
    return DiffusionBatchState(
        prompt_embeddings=jnp.where(there[..., None], model.embed(jnp.asarray(ids)), 0),
        block_windows=[
            DiffusionBlockMeta(index, number, start, min(start + size, total))
            for index, (prompt, total) in enumerate(zip(prompts, totals, strict=True))
            for number, start in enumerate(range(len(prompt), total, size))
        ],
        kv_handles=[pool.pages_of(seat, total) for seat, total in enumerate(totals)],
        iteration_counters=[0] * len(prompts),
        canvas=[
            [*prompt, *[vicinity.mask_token_id] * (total - len(prompt))]
            for prompt, total in zip(prompts, totals, strict=True)
        ],
        output_ids=[[] for _ in prompts],
        arrays={KV: kv, CANVAS: canvas},
    )


def _check(index: int, prompt: Sequence[int], total: int, config: ModelConfig) -> None:
    if not prompt:
        raise ValueError(f"prompt {index} is empty")
    if not all(0 <= token < config.vocab_size for token in prompt):
        raise ValueError(f"prompt {index} has tokens outside the vocabulary of {config.vocab_size}")
    if config.mask_token_id in prompt:
        raise ValueError(f"prompt {index} has the mask token, {config.mask_token_id}")
    if total > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise ValueError(f"request {index} may grow to {total} tokens, and the model has {most} positions")

"""Padded rounds over caches that held noise before, with bugs to be planted into what a round says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.alignment import AlignmentManager, AlignmentState
from jaxinfer.textbook.branching import CachedForward, ModelKVCache
from tests.branching.stories import MOST_BRANCHES

# One size for all stories, so that few programs are compiled.
ROWS, WIDTH, SLOTS = MOST_BRANCHES, 12, 72

type Bug = Callable[[AlignmentState], tuple[np.ndarray, np.ndarray]]


def no_bug(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    return state.position_ids, state.query_mask


@cache
def _forward(model: DecoderLM) -> CachedForward:
    return CachedForward(model)


class PaddedBranches:
    """The cache of up to `ROWS` branches that share a prefix. What is not written yet is noise, not zeros."""

    def __init__(self, model: DecoderLM, prefix: Sequence[int]) -> None:
        rng = np.random.default_rng(0)
        self.cache = ModelKVCache.allocate(model.config, SLOTS, batch_size=ROWS)
        noise = [tuple(jnp.float32(3 * rng.standard_normal(x.shape)) for x in layer) for layer in self.cache.data]
        self.cache.written(noise, 0)
        self.forward = _forward(model)
        alone = AlignmentManager(ROWS)
        for start in range(0, len(prefix), WIDTH):
            part = prefix[start : start + WIDTH]
            self.run(alone.align_for_decode([len(part)] * ROWS, [part] * ROWS))

    def run(self, state: AlignmentState, bug: Bug = no_bug) -> dict[int, np.ndarray]:
        """A round: the last column's logits, float32 [vocab], of each branch that has a token there."""
        positions, query_mask = bug(state)
        rows, width, end = list(state.branch_ids), state.input_ids.shape[1], state.cache_length
        ids, depths = np.zeros((2, ROWS, width), np.int32)
        ids[rows], depths[rows] = state.input_ids, positions
        seen = np.zeros((ROWS, width, end), bool)
        seen[rows] = query_mask
        logits = self.forward(self.cache, ids, depths, np.arange(end - width, end), seen)
        return {b: logits[b, -1] for b, count in zip(state.branch_ids, state.input_lengths, strict=True) if count}

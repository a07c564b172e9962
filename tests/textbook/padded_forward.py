"""Branches computed as SpecSoT's batching mode does it: one dense rectangle a round, one cache row for each branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.alignment import AlignmentManager, AlignmentState
from kernels_pallas.rotate_and_write.reference import rotate
from tests.branching.stories import MOST_BRANCHES

# One shape for all rounds, so that one program is compiled.
ROWS, WIDTH, SLOTS = MOST_BRANCHES, 12, 72

type Bug = Callable[[AlignmentState], tuple[np.ndarray, np.ndarray]]


def no_bug(state: AlignmentState) -> tuple[np.ndarray, np.ndarray]:
    return state.position_ids, state.query_mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotAttend:
    """An `Attend` over dense rows of slots: this round's keys and values go to `slots`, a mask says what is seen."""

    slots: jax.Array  # int32 [L]; out of range: written nowhere
    query_mask: jax.Array  # bool [B, L, S]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        assert kv is not None
        q, *new = rotate(heads)
        k, v = (old.at[:, self.slots].set(x, mode="drop") for old, x in zip(kv, new, strict=True))
        return masked_attention(q, k, v, self.query_mask), (k, v)


@cache
def _compiled(model: DecoderLM):
    graph, weights = nnx.split(model)

    @jax.jit
    def last_logits(weights, kv, ids, positions, attend):
        model = nnx.merge(graph, weights)
        hidden, kv, _ = model.with_kv(kv, ids, positions, attend, positions + 1)
        return model.logits(hidden[:, -1]), kv

    return lambda *args: last_logits(weights, *args)


class PaddedBranches:
    """The cache of up to `ROWS` branches that share a prefix. What is not written yet is noise, not zeros."""

    def __init__(self, model: DecoderLM, prefix: Sequence[int]) -> None:
        config, rng = model.config, np.random.default_rng(0)
        shape = (ROWS, SLOTS, config.num_kv_heads, config.head_dim)
        self.kv = [tuple(jnp.float32(3 * rng.standard_normal(shape)) for _ in "kv") for _ in range(config.num_layers)]
        self.forward = _compiled(model)
        alone = AlignmentManager(ROWS)
        for start in range(0, len(prefix), WIDTH):
            part = prefix[start : start + WIDTH]
            self.run(alone.align_for_decode([len(part)] * ROWS, [part] * ROWS))

    def run(self, state: AlignmentState, bug: Bug = no_bug) -> dict[int, np.ndarray]:
        """A round: the last column's logits, float32 [vocab], of each branch that has a token there."""
        positions, query_mask = bug(state)
        width, end = state.input_ids.shape[1], state.cache_length
        assert width <= WIDTH and end <= SLOTS and max(state.branch_ids) < ROWS
        rows, columns = list(state.branch_ids), slice(WIDTH - width, WIDTH)
        ids, depths = np.zeros((2, ROWS, WIDTH), np.int32)
        ids[rows, columns], depths[rows, columns] = state.input_ids, positions
        mask = np.zeros((ROWS, WIDTH, SLOTS), bool)
        mask[rows, columns, :end] = query_mask
        slots = np.full(WIDTH, SLOTS, np.int32)
        slots[columns] = np.arange(end - width, end)
        logits, self.kv = self.forward(self.kv, ids, depths, SlotAttend(slots, mask))
        logits = np.asarray(logits)
        return {b: logits[b] for b, count in zip(state.branch_ids, state.input_lengths, strict=True) if count}

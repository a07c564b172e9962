"""An EAGLE-3 head over a cache of fixed size, for drafters whose trees are one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.eagle3 import Eagle3Head
from jaxinfer.textbook.branching.cached_forward import SlotAttend, pad_round
from jaxinfer.textbook.branching.kv_cache import ModelKVCache


class Eagle3Forward:
    """A head that computes tokens over a `ModelKVCache` of one layer, which it updates in place.

    A token's input is its embedding and the feature of the token before it: the target's, or where that token was
    drafted, the head's own output for it (Li et al. 2025, EAGLE-3).

    Attributes:
        config: sizes of the head's layer, for the cache.
        target_ids: int32 [draft vocab], the target's id of each token that the head can draft.
        num_features: features of a token in the target.
        shapes: rows and columns of each call so far, without padding.
    """

    def __init__(self, head: Eagle3Head, target: DecoderLM) -> None:
        """Take a head, and its target for the embeddings, if the head has none of its own.

        Raises:
            ValueError: the head's rotary frequencies depend on the length of a prompt.
        """
        self.config, self.dtype = head.config.layer, head.dtype
        if self.config.rope.depends_on_length:
            raise ValueError(f"head: its rope_type is {self.config.rope.rope_type!r}, allowed are the other types")
        self.num_features = head.config.num_features
        self.target_ids = np.asarray(head.target_ids[...])
        self.shapes: list[tuple[int, int]] = []
        self._graph, self._state = nnx.split(head)
        self._table = (target if head.embed is None else head).embed.embedding[...]  # type: ignore[union-attr]

    def __call__(
        self,
        cache: ModelKVCache,
        token_ids: np.ndarray,
        position_ids: np.ndarray,
        slots: Sequence[int] | np.ndarray,
        seen: np.ndarray,
        features: np.ndarray,
        *,
        of_target: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute L >= 1 tokens; returns logits float32 [L, draft vocab], and outputs [L, hidden] as next features.

        Args:
            cache, token_ids, position_ids, slots, seen: as for `CachedForward`, of one row; no token is at position 0.
            features: [L, num_features] of the target, or [L, hidden] of the head, each of the token before.
            of_target: which of these they are.

        Raises:
            ValueError: as `CachedForward`.
        """
        count = token_ids.shape[1]
        ids, positions, at, mask = pad_round(self.config, cache, token_ids, position_ids, slots, seen)
        padded = np.zeros((1, ids.shape[1], features.shape[1]), features.dtype)
        padded[0, :count] = features
        logits, hidden, data = _forward(
            self._graph, of_target, self._state, self._table, cache.data[0], ids, positions, at, mask, padded
        )
        cache.written([data], max(cache.current_length, int(np.max(slots)) + 1))
        self.shapes.append((1, count))
        return np.asarray(logits)[0, :count], np.asarray(hidden)[0, :count]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _forward(
    graph: nnx.GraphDef[Eagle3Head],
    of_target: bool,
    state: nnx.State,
    table: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    ids: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    seen: jax.Array,
    features: jax.Array,
) -> tuple[jax.Array, jax.Array, LayerKV]:
    head, given = nnx.merge(graph, state), features.astype(table.dtype)
    projected = head.project(given) if of_target else given
    before = jnp.maximum(positions - 1, 0)  # the head's positions are those of the features; 0 is for padding
    found = head(jnp.take(table, ids, axis=0), projected, before, SlotAttend(slots, seen), kv, before + 1)
    return head.logits(found.normed), found.hidden, found.kv

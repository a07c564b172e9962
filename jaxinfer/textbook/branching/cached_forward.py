"""A decoder over caches of fixed size: any tokens, written to any slots, that see what a mask says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.branching.kv_cache import ModelKVCache
from jaxinfer.textbook.plain_layers import check_plain_layers
from kernels_pallas.rotate_and_write.reference import rotate

SMALLEST_WIDTH = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotAttend:
    """An `Attend` over rows of slots: new keys and values are written to `slots`, and a mask says what is seen."""

    slots: jax.Array  # int32 [L], of every row alike; out of range: written nowhere
    seen: jax.Array  # bool [B, L, S]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        assert kv is not None
        q, *new = rotate(heads)
        # Caches are [B, heads, S, head_dim], as SpecSoT has them; attention takes [B, S, heads, head_dim].
        k, v = (
            old.at[:, :, self.slots].set(x.swapaxes(1, 2).astype(old.dtype), mode="drop")
            for old, x in zip(kv, new, strict=True)
        )
        found = masked_attention(
            q, k.swapaxes(1, 2), v.swapaxes(1, 2), self.seen, scale=heads.scale, cap=heads.cap, sinks=heads.sinks
        )
        return found, (k, v)


class CachedForward:
    """A converted model that computes tokens over a `ModelKVCache`, which it updates in place.

    Rounds are padded to widths of 8, 16, 32 and so on, so that few programs are compiled; padding is written nowhere.

    Attributes:
        shapes: rows and columns of each call so far, without that padding.
    """

    def __init__(self, model: DecoderLM) -> None:
        """Take a causal decoder.

        Raises:
            ValueError: it is a diffusion model, its layers have windows or differ, or its rotary frequencies depend on
                the length of a prompt, of which branches have several.
        """
        if model.config.mask_token_id is not None:
            raise ValueError(f"model: {model.config.architecture} is a diffusion model, allowed are causal decoders")
        check_plain_layers(model.config)
        if model.config.rope.depends_on_length:
            raise ValueError(f"model: its rope_type is {model.config.rope.rope_type!r}, allowed are the other types")
        self.config, self.dtype = model.config, model.dtype
        self.shapes: list[tuple[int, int]] = []
        self._graph, self._state = nnx.split(model)

    def __call__(
        self,
        cache: ModelKVCache,
        token_ids: np.ndarray,
        position_ids: np.ndarray,
        slots: Sequence[int] | np.ndarray,
        seen: np.ndarray,
    ) -> np.ndarray:
        """Compute L tokens of each of B rows; returns logits float32 [B, L, vocab].

        The cache's length becomes the greatest that it had or that these slots reach.

        Args:
            cache: of B rows.
            token_ids, position_ids: int32 [B, L].
            slots: int32 [L], where the columns' KV goes, in every row.
            seen: bool [B, L, C], the first C slots that each token sees, after all tokens have been written; a token
                that sees nothing is padding.

        Raises:
            ValueError: a slot is not within the cache, or a token is at a position that the model does not have.
        """
        rows, count = token_ids.shape
        if count == 0:
            return np.zeros((rows, 0, self.config.vocab_size), np.float32)
        padded = pad_round(self.config, cache, token_ids, position_ids, slots, seen)
        logits, data = _forward(self._graph, self._state, cache.data, *padded)
        cache.written(data, max(cache.current_length, int(np.max(slots)) + 1))
        self.shapes.append((rows, count))
        return np.asarray(logits)[:, :count]


def pad_round(
    config: ModelConfig,
    cache: ModelKVCache,
    token_ids: np.ndarray,
    position_ids: np.ndarray,
    slots: Sequence[int] | np.ndarray,
    seen: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, positions, slots and mask of a round, padded to a width for which a program is compiled.

    Padding has a slot after the cache's, so that it is written nowhere. Arguments and errors are those of
    `CachedForward`; there is at least one column.
    """
    (rows, count), wanted = token_ids.shape, np.asarray(slots, np.int32)
    if not 0 <= wanted.min() <= wanted.max() < cache.capacity:
        raise ValueError(f"slots: {wanted.min()} to {wanted.max()}, allowed are 0 to {cache.capacity - 1}")
    if position_ids.max() >= config.max_position_embeddings:
        most = config.max_position_embeddings - 1
        raise ValueError(f"position_ids: up to {position_ids.max()}, allowed are 0 to {most}")
    width = max(SMALLEST_WIDTH, 1 << (count - 1).bit_length())
    ids, positions = np.zeros((2, rows, width), np.int32)
    ids[:, :count], positions[:, :count] = token_ids, position_ids
    at = np.full(width, cache.capacity, np.int32)
    at[:count] = wanted
    mask = np.zeros((rows, width, cache.capacity), bool)
    mask[:, :count, : seen.shape[2]] = seen
    return ids, positions, at, mask


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _forward(
    graph: nnx.GraphDef[DecoderLM],
    state: nnx.State,
    kv: list[tuple[jax.Array, jax.Array]],
    ids: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, list[LayerKV]]:
    model = nnx.merge(graph, state)
    hidden, after, _ = model.with_kv(kv, ids, positions, SlotAttend(slots, seen), positions + 1)
    return model.logits(hidden), after

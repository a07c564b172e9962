"""Any converted model as a `LanguageModel`: one sequence, one cache of fixed size, few compiled shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.plain_layers import check_plain_layers
from kernels_pallas.rotate_and_write.reference import rotate

SMALLEST_WIDTH = 8
CACHE_STEP = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceCache:
    """Keys and values of one sequence of up to S tokens."""

    kv: Sequence[LayerKV]  # of every layer: keys and values, [S, num_kv_heads, head_dim] each
    prompt_len: jax.Array  # int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheAttend:
    """An `Attend` over one sequence's cache: KV is written to the tokens' positions, queries see up to their own."""

    positions: jax.Array  # int32 [T]; tokens beyond the cache's end are not written

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        assert kv is not None
        q, *new = rotate(heads)
        k, v = (old.at[self.positions].set(x.astype(old.dtype), mode="drop") for old, x in zip(kv, new, strict=True))
        visible = jnp.arange(k.shape[0]) <= self.positions[:, None]
        return masked_attention(q, k, v, visible, scale=heads.scale, cap=heads.cap, sinks=heads.sinks), (k, v)


class CachedDecoder:
    """A `LanguageModel` from a converted model.

    Widths are 1 or powers of two from 8 on, and cache sizes are multiples of 64, so a script compiles few programs.
    """

    def __init__(self, model: DecoderLM) -> None:
        """Take a causal decoder.

        Raises:
            ValueError: its layers have windows, or other things that one cache for all of them does not hold.
        """
        check_plain_layers(model.config)
        self.config = model.config
        self.dtype = model.dtype
        self._graph, self._state = nnx.split(model)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_len(self) -> int:
        return self.config.max_position_embeddings

    def init_cache(self, max_len: int, prompt_len: int) -> SequenceCache:
        """Return a cache of zeros with room for `max_len` tokens."""
        size = -(-max_len // CACHE_STEP) * CACHE_STEP
        shape = (size, self.config.num_kv_heads, self.config.head_dim)
        kv = [(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in range(self.config.num_layers)]
        return SequenceCache(kv, jnp.int32(prompt_len))

    def forward(
        self, cache: SequenceCache, token_ids: np.ndarray, start: int, last: int
    ) -> tuple[np.ndarray, SequenceCache]:
        """Compute logits as `LanguageModel.forward` does."""
        count = len(token_ids)
        padded = np.zeros(_width(count), np.int32)
        padded[:count] = token_ids
        where = np.asarray([start, count - last], np.int32)
        logits, cache = _forward(self._graph, _width(last), self._state, cache, padded, where)
        return np.asarray(logits)[:last], cache


def _width(count: int) -> int:
    return 1 if count == 1 else max(SMALLEST_WIDTH, 1 << (count - 1).bit_length())


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _forward(
    graph: nnx.GraphDef[DecoderLM], rows: int, state: nnx.State, cache: SequenceCache, ids: jax.Array, where: jax.Array
) -> tuple[jax.Array, SequenceCache]:
    """Return logits float32 [rows, V] after the tokens from index where[1] on; where[0] is the first token's position.

    Padding after the tokens writes KV that no query sees before it is overwritten.
    """
    model = nnx.merge(graph, state)
    positions = where[0] + jnp.arange(ids.shape[0], dtype=jnp.int32)
    lengths = jnp.maximum(positions + 1, cache.prompt_len)
    hidden, kv, _ = model.with_kv(cache.kv, ids, positions, CacheAttend(positions), lengths)
    wanted = jnp.minimum(where[1] + jnp.arange(rows), ids.shape[0] - 1)
    return model.logits(hidden[wanted]), SequenceCache(kv, cache.prompt_len)

"""A step through the model: its K and V into the pool, and the hidden states of its tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import StepBatch
from kernels_pallas.branch_attention.blocks import AttentionSizes


def forward(model: DecoderLM, cache: KVCache, batch: StepBatch, backend: AttentionBackend) -> tuple[KVCache, jax.Array]:
    """Write the batch's K and V into the cache; hidden states [T, hidden] of its tokens."""
    keys, values = list(cache.k), list(cache.v)
    config = model.config
    scale = config.head_dim**-0.5
    tokens = batch.token_ids.shape[0]
    more = (0, max(0, backend.min_tokens - tokens))
    # Padding tokens have no row: attention does not hear of them.
    slots = jnp.pad(batch.slot_mapping, more, constant_values=cache.num_pages * cache.page_size)
    plan = backend.plan(
        batch,
        AttentionSizes(
            config.num_heads, config.num_kv_heads, config.head_dim, cache.page_size, model.dtype, cache.k[0].dtype
        ),
    )

    def attend(layer: int, heads: ProjectedHeads) -> jax.Array:
        q, keys[layer], values[layer] = backend.rotate_and_write(heads, keys[layer], values[layer], slots)
        out = backend.attention(q[:tokens], keys[layer], values[layer], plan, scale=scale)
        return jnp.pad(out, (more, (0, 0), (0, 0)))

    padded = (jnp.pad(x, more) for x in (batch.token_ids, batch.positions, batch.lengths))
    token_ids, positions, lengths = padded
    hidden = model(token_ids, positions, attend, lengths, backend.residual(token_ids.shape[0]))
    return KVCache(k=tuple(keys), v=tuple(values)), hidden[:tokens]

"""Forward pass of a model over a batch and the KV pool, which programs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.layer_config import LayerConfig
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.windows import within_window
from kernels_pallas.branch_attention.blocks import AttentionSizes
from kernels_pallas.rotate_and_write.reference import rotate_queries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedAttend:
    """An `Attend` of a step's tokens, which writes their K and V into the pool first."""

    slots: jax.Array  # int32 [T], padding included
    plans: tuple[Any, ...]  # of the step, one for each kind of layers, see `AttentionBackend`
    backend: AttentionBackend = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})  # of the step; the plans leave out the padding after them
    kinds: tuple[LayerConfig, ...] = field(metadata={"static": True})

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        assert kv is not None
        num_heads, num_kv_heads, head_dim = heads.geometry
        kind = LayerConfig(num_heads, num_kv_heads, head_dim, None, heads.window)
        plan = self.plans[self.kinds.index(kind)]
        if heads.has_kv:
            q, k_pages, v_pages = self.backend.rotate_and_write(heads, *kv, self.slots)
        else:
            q, (k_pages, v_pages) = rotate_queries(heads), kv
        scale = head_dim**-0.5 if heads.scale is None else heads.scale
        found = self.backend.attention(
            q[: self.tokens], k_pages, v_pages, plan, scale=scale, cap=heads.cap, sinks=heads.sinks
        )
        return jnp.pad(found, ((0, q.shape[0] - self.tokens), (0, 0), (0, 0))), (k_pages, v_pages)


def forward(
    model: DecoderLM,
    cache: KVPool,
    batch: StepBatch,
    backend: AttentionBackend,
    added: jax.Array | None = None,
) -> tuple[KVPool, jax.Array]:
    """Write the batch's K and V into the cache; return it and the hidden states [T, hidden] of the batch's tokens.

    Args:
        added: [T, hidden], added to the embeddings of the tokens.
    """
    return forward_with_features(model, cache, batch, backend, (), added)[:2]


def forward_with_features(
    model: DecoderLM,
    cache: KVPool,
    batch: StepBatch,
    backend: AttentionBackend,
    capture: Sequence[int],
    added: jax.Array | None = None,
) -> tuple[KVPool, jax.Array, jax.Array | None]:
    """Do as `forward`, and also return the inputs [T, F * hidden] of the F layers of `capture`, for a drafter."""
    tokens = batch.token_ids.shape[0]
    attend = paged_attend(model.config, model.dtype, cache, batch, backend)
    token_ids, positions, lengths = (padded(x, backend) for x in (batch.token_ids, batch.positions, batch.lengths))
    residual = backend.residual(token_ids.shape[0])
    stored = iter(zip(cache.k, cache.v, strict=True))
    own = [layer.kv_from is None for layer in model.config.all_layers]
    kv = [next(stored) if is_own else None for is_own in own]
    more = None if added is None else padded(added, backend)
    found = model.with_kv(kv, token_ids, positions, attend, lengths, residual, capture, more)
    k, v = zip(*[pages for pages, is_own in zip(found.kv, own, strict=True) if is_own and pages], strict=True)
    features = None if found.features is None else found.features[:tokens]
    return KVPool(k, v), found.hidden[:tokens], features


def paged_attend(
    config: ModelConfig, dtype: jnp.dtype, cache: KVPool, batch: StepBatch, backend: AttentionBackend
) -> PagedAttend:
    """Return the attention of a step's tokens, padded, in layers of one configuration."""

    def plan(kind: LayerConfig) -> Any:
        sizes = AttentionSizes(
            kind.num_heads, kind.num_kv_heads, kind.head_dim, cache.page_size, dtype, cache.k[0].dtype
        )
        return backend.plan(within_window(batch, kind.window, page_size=cache.page_size), sizes)

    return PagedAttend(
        padded(batch.slot_mapping, backend, cache.num_slots),
        tuple(plan(kind) for kind in config.kinds),
        backend,
        batch.token_ids.shape[0],
        config.kinds,
    )


def padded(tokens_first: jax.Array, backend: AttentionBackend, value: int = 0) -> jax.Array:
    """Pad an array [T, ...] of a step's tokens to the fewest tokens that the backend takes."""
    more = max(0, backend.min_tokens - tokens_first.shape[0])
    return jnp.pad(tokens_first, ((0, more), *((0, 0),) * (tokens_first.ndim - 1)), constant_values=value)

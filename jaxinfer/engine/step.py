"""The one device step: (params, cache, batch) -> (cache, output), pure, compiled once per shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.engine.step_batch import BatchShape, PackedBatch, StepBatch, unpack
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.sampler import sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What comes back from the device. Q wanted logits."""

    token_ids: jax.Array  # int32 [Q], sampled


def forward(model: DecoderLM, cache: KVCache, batch: StepBatch, backend: AttentionBackend) -> tuple[KVCache, jax.Array]:
    """Write the batch's K and V into the cache; hidden states [T, hidden] of its tokens."""
    keys, values = list(cache.k), list(cache.v)
    scale = model.config.head_dim**-0.5

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys[layer] = backend.write_kv(keys[layer], k, batch.slot_mapping)
        values[layer] = backend.write_kv(values[layer], v, batch.slot_mapping)
        return backend.attention(q, keys[layer], values[layer], batch, scale=scale)

    hidden = model(batch.token_ids, batch.positions, attend, batch.lengths)
    return KVCache(k=tuple(keys), v=tuple(values)), hidden


def step(model: DecoderLM, cache: KVCache, batch: StepBatch, backend: AttentionBackend) -> tuple[KVCache, StepOutput]:
    """One step of every way of decoding: new tokens into their slots, logits where wanted, sampled tokens out."""
    cache, hidden = forward(model, cache, batch, backend)
    logits = model.logits(hidden[batch.logits_index])
    return cache, StepOutput(token_ids=sample(logits, batch.sampling))


class StepRunner:
    """Holds parameters and cache on the device and runs steps on them.

    The model is flattened once: a step's call passes its leaves, and the module tree exists only while tracing.
    """

    def __init__(
        self,
        model: DecoderLM,
        cache: KVCache,
        backend: AttentionBackend,
        on_compile: Callable[[BatchShape], None] = lambda shape: None,
    ) -> None:
        graph, state = nnx.split(model)
        self.params, structure = jax.tree.flatten(state)
        self.cache = cache

        @partial(jax.jit, static_argnames="shape", donate_argnames="cache")
        def run_step(params: list[jax.Array], cache: KVCache, buffer: jax.Array, shape: BatchShape):
            on_compile(shape)  # runs while tracing: once per compiled program
            model = nnx.merge(graph, jax.tree.unflatten(structure, params))
            return step(model, cache, unpack(buffer, shape), backend)

        self._run_step = run_step

    def run(self, packed: PackedBatch) -> StepOutput:
        """Launch one step. Returns at once; reading the output waits for the device."""
        self.cache, output = self._run_step(self.params, self.cache, packed.buffer, shape=packed.shape)
        return output

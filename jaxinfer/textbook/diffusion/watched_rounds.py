"""Denoising rounds that also return their logits, which the engine's own programs do not keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.diffusion.canvas import CANVAS
from jaxinfer.diffusion.canvas_rounds import canvas_rounds
from jaxinfer.diffusion.drawing import logits_without
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.diffusion.vicinity import Vicinity
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, StepBatch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import KV
from jaxinfer.textbook.diffusion.placement import Placement


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Watched(KVPool):
    """The pool that rounds carry, with the hidden states that they computed."""

    hidden: jax.Array  # [T, hidden], of each of the launch's tokens in the last round that it took part in


type Launch = Callable[..., tuple[dict[str, Any], DenoiseOutput, jax.Array]]


def watched_rounds(model: DecoderLM, vicinity: Vicinity, placement: Placement, max_rounds: int) -> Launch:
    """Return a compiled function `launch(state, logits, buffer, begins, shape=...)` of up to `max_rounds` rounds of
    windows, or of one round of whole sequences. It takes:

        state: `KV` and `CANVAS`, the device's pool and canvas; donated.
        logits: float32 [S, B, vocab], of the blocks of all seats.
        buffer, shape: a packed batch.
        begins: int32 [Q], where in the launch's tokens each row's block starts.

    It returns the new state, with its arrays where `placement` says, the rounds' output, and the logits, in which the
    launch's rows have those of their last round, with the mask token excluded.
    """
    graph, params = nnx.split(model)
    backend, whole = placement.backend, placement.whole
    # The next launch takes these arrays: with other shardings it would be another program.
    out = None if whole is None else ({KV: placement.pages, CANVAS: whole}, whole, whole)
    # A parameter on the host would be sent again with every launch.
    params = jax.tree.map(jnp.asarray, params)

    @partial(jax.jit, static_argnames="shape", donate_argnames="state", out_shardings=out)
    def run(
        params: Any, state: dict[str, Any], logits: jax.Array, buffer: jax.Array, begins: jax.Array, shape: BatchShape
    ) -> tuple[dict[str, Any], DenoiseOutput, jax.Array]:
        model = nnx.merge(graph, params)
        batch, kv = unpack(buffer, shape), state[KV]
        tokens = shape.decode_rows * shape.block_size + shape.prefill_tokens

        def compute(watched: KVPool, wide: StepBatch, added: jax.Array | None) -> tuple[KVPool, jax.Array]:
            assert isinstance(watched, _Watched)
            kv, hidden = forward(model, KVPool(watched.k, watched.v), wide, backend, added)
            # Rows that do not take part in the round are padding.
            last = jnp.where((wide.limit >= 0)[:, None], hidden, watched.hidden)
            return _Watched(kv.k, kv.v, last), hidden

        before = _Watched(kv.k, kv.v, jnp.zeros((tokens, model.config.hidden_size), model.dtype))
        watched, canvas, found = canvas_rounds(
            model, before, state[CANVAS], batch, vicinity, compute,
            max_rounds=1 if shape.prefill_tokens else max_rounds,
        )  # fmt: skip
        assert isinstance(watched, _Watched)
        places = jnp.clip(begins[:, None] + jnp.arange(vicinity.block_size), 0, tokens - 1)
        own = logits_without(model, watched.hidden[places.reshape(-1)], vicinity.mask_token_id)
        own = own.reshape(*places.shape, -1)
        logits = logits.at[batch.samples.seat].set(own, mode="drop")
        return {KV: KVPool(watched.k, watched.v), CANVAS: canvas}, found, logits

    return partial(run, params)

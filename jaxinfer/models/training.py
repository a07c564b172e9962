"""The forward pass of a training step: batched, without a cache, and differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.models.decoder import DecoderLM


def logits(
    module: DecoderLM,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    remat: bool = False,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Return the logits float32 [..., T, vocab] of the token after each of `tokens`.

    They are those that the engine samples from, up to rounding: the same module computes both.

    Args:
        module: an autoregressive model, as `load_checkpoint` or `build_model` makes it.
        tokens: int32 [..., T].
        positions: int32 [..., T], of each token within its sequence, from 0.
        segment_ids: int32 [..., T], of packed sequences, each in neighbouring places: tokens see those of their own
            alone. Padding is a segment too, whose logits mean nothing. None: each row is one sequence.
        remat: keep the inputs of layers alone, and compute each layer again for its gradients.
        lengths: int32 [..., T], read by rotary types that depend on a sequence's length, see `rope_cos_sin`. None: the
            length of its segment for longrope, position + 1 for the dynamic type.

    Raises:
        ValueError: it is a diffusion model, whose tokens do not follow from those before them.
    """
    config = module.config
    if config.mask_token_id is not None:
        raise ValueError(f"{config.architecture} is a diffusion model: no token follows from those before it alone")
    if lengths is None and config.rope.turning_length is not None:
        lengths = _lengths(positions, segment_ids)
    attend, caches = CausalAttend(segment_ids), [None] * config.num_layers
    return module.logits(module.with_kv(caches, tokens, positions, attend, lengths, remat=remat).hidden)


def _lengths(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return the length int32 [..., T] of each token's segment."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.max(positions, axis=-1, keepdims=True) + 1, positions.shape)
    is_same = segment_ids[..., :, None] == segment_ids[..., None, :]
    return jnp.max(jnp.where(is_same, positions[..., None, :], 0), axis=-1) + 1

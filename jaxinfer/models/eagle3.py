"""EAGLE-3 heads: one layer that drafts token by token from features of a target (Li et al. 2025).

A head's token t is the pair of the target's feature at t - 1 and the embedding of token t, at position t - 1. Where the
target has no feature yet, because t - 1 was drafted, the head's own output at t - 1 replaces it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.attention.attend import Attend, LayerKV
from jaxinfer.attention.residual import PLAIN, Residual
from jaxinfer.models.attention_layer import Attention, Rotation
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.models.layers import MLP, Embedding, OutputHead, Projection, RMSNorm
from jaxinfer.models.rope import rope_cos_sin


class TokenIds(nnx.Variable):
    """Token ids, which training does not change."""


class HeadOutput(NamedTuple):
    """Outputs of a head for T tokens."""

    hidden: jax.Array  # [..., T, hidden], before the final norm; the features of the next draft
    normed: jax.Array  # [..., T, hidden], after the final norm; the input of `logits`
    kv: LayerKV


class Eagle3Head(nnx.Module):
    """One decoder layer over pairs of embeddings and features, with an output head for the draft vocabulary."""

    def __init__(self, config: Eagle3Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs) -> None:
        layer = config.layer
        hidden, eps = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.embed = Embedding(layer.vocab_size, hidden, dtype, rngs) if config.has_embeddings else None
        # Features that are as wide as the head need no projection.
        self.fc = (
            None
            if config.num_features == hidden
            else Projection((config.num_features,), (hidden,), bias=False, dtype=dtype, rngs=rngs)
        )
        self.input_norm = RMSNorm(hidden, eps, dtype)
        self.feature_norm = RMSNorm(hidden, eps, dtype)
        self.attention = Attention(layer, layer.common_layer, dtype, rngs, inputs=2 * hidden)
        self.post_attention_norm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(layer, dtype, rngs)
        self.final_norm = RMSNorm(hidden, eps, dtype)
        self.lm_head = OutputHead(config.draft_vocab_size, hidden, dtype, rngs)
        # int32 [draft_vocab_size]: the target's token id of each draft token.
        self.target_ids = TokenIds(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of parameters and activations."""
        return self.lm_head.kernel.dtype

    def project(self, features: jax.Array) -> jax.Array:
        """Project the target's features [..., num_features] to [..., hidden]."""
        return features if self.fc is None else self.fc(features)

    def __call__(
        self,
        embedded: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kv: LayerKV = None,
        lengths: jax.Array | None = None,
        residual: Residual = PLAIN,
    ) -> HeadOutput:
        """Run the head over T tokens.

        Args:
            embedded: [..., T, hidden], the tokens' embeddings.
            features: [..., T, hidden], features of the token before each: projected, or the head's own `hidden`.
            positions: int32 [..., T], each the token's own position minus 1.
            attend: called with `kv` and the projected heads.
            lengths: int32 [..., T], see `rope_cos_sin`.
            residual: as for `DecoderLM.with_kv`.
        """
        layer = self.config.layer
        rotation = Rotation(*lax.optimization_barrier(rope_cos_sin(layer.rope, layer.head_dim, positions, lengths)))
        x, y, kv = _attend_and_project(
            self, residual.from_tokens(embedded), residual.from_tokens(features), kv, rotation, attend, residual
        )
        hidden, normed = self.final_norm.after(x, y, residual)
        return HeadOutput(residual.to_tokens(hidden), residual.to_tokens(normed), kv)

    def logits(self, normed: jax.Array) -> jax.Array:
        """Return logits float32 [..., draft_vocab_size] of `HeadOutput.normed`."""
        return jnp.einsum("...h,vh->...v", normed, self.lm_head.kernel[...], preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnames="residual")
def _attend_and_project(
    head: Eagle3Head,
    embedded: jax.Array,
    features: jax.Array,
    kv: LayerKV,
    rotation: Rotation,
    attend: Attend,
    residual: Residual,
):
    """Run the layer; it is traced once for all its uses in a program, see `DecoderLayer`."""
    _, words = head.input_norm.after(embedded, None, residual)
    x, before = head.feature_norm.after(features, None, residual)
    both = jnp.concatenate([words, before], axis=residual.features_axis)
    y, kv = head.attention(both, kv, rotation, attend, residual)
    x, normed = head.post_attention_norm.after(x, y, residual)
    return x, head.mlp(normed, residual), kv

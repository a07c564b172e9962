"""The decoder-only transformer that all families instantiate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.attention.attend import Attend, LayerKV
from jaxinfer.attention.residual import PLAIN, Residual
from jaxinfer.models.attention_layer import Rotation
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder_layer import DecoderLayer
from jaxinfer.models.layers import Embedding, OutputHead, RMSNorm, scaled
from jaxinfer.models.per_layer import PerLayerEmbeddings
from jaxinfer.models.rope import RopeConfig, rope_cos_sin
from kernels_pallas.add_and_norm.reference import rms_norm


class Computed(NamedTuple):
    """Outputs of a model for T tokens."""

    hidden: jax.Array  # [..., T, hidden], after the final norm
    kv: list[LayerKV]  # one entry for each layer
    features: jax.Array | None  # [..., T, F * hidden], the inputs of F layers, concatenated, before their norms


class DecoderLM(nnx.Module):
    """Token ids to hidden states to logits; `attend` decides which tokens see each other."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype, rngs)
        self.layers = nnx.List([DecoderLayer(config, number, dtype, rngs) for number in range(config.num_layers)])
        self.final_norm = RMSNorm.of(config, dtype)
        self.per_layer = PerLayerEmbeddings(config, dtype, rngs) if config.per_layer_size else None
        self.lm_head = (
            None if config.tie_word_embeddings else OutputHead(config.vocab_size, config.hidden_size, dtype, rngs)
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of parameters and activations."""
        return self.embed.embedding.dtype

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        lengths: jax.Array | None = None,
        residual: Residual = PLAIN,
    ) -> jax.Array:
        """Return the hidden states of `with_kv` for tokens without cached keys and values."""
        return self.with_kv([None] * len(self.layers), token_ids, positions, attend, lengths, residual).hidden

    def with_kv(
        self,
        kv: Sequence[LayerKV],
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        lengths: jax.Array | None = None,
        residual: Residual = PLAIN,
        capture: Sequence[int] = (),
        added: jax.Array | None = None,
        remat: bool = False,
    ) -> Computed:
        """Compute hidden states, keys and values of every layer, and features for a drafter.

        Args:
            kv: cache of each layer, in which `attend` finds the past; None for layers that read another one's.
            token_ids: int32 [..., T].
            positions: int32 [..., T], the rotary position of each token.
            attend: called in each layer with that layer's `kv` and projected heads.
            lengths: int32 [..., T], used by rotary types that depend on the sequence's length (see `rope_cos_sin`).
            residual: layout of activations, and how the results of layers join the residual stream; with
                `features_first`, tokens are [T].
            capture: ascending numbers of the layers whose inputs are the features.
            added: [..., T, hidden], added to the embeddings of the tokens.
            remat: gradients compute each layer again, from its inputs.
        """
        rotations = self._rotations(positions, lengths)
        embeddings = self._embedded(token_ids)
        more = None if self.per_layer is None else self.per_layer(token_ids, embeddings)
        x, y = residual.from_tokens(embeddings if added is None else embeddings + added), None
        after, captured = [], []
        for number, (layer, before) in enumerate(zip(self.layers, kv, strict=True)):
            x, normed = layer.enter(x, y, residual)
            if number in capture:
                captured.append(residual.to_tokens(x))
            source = self.config.layer(number).kv_from
            own = None if more is None else residual.from_tokens(more[..., number, :])
            compute = partial(layer, attend=attend, residual=residual)
            x, y, layer_kv = (jax.checkpoint(compute) if remat else compute)(
                x, normed, before if source is None else after[source], rotations[number], own=own
            )
            after.append(layer_kv)
        assert len(captured) == len(capture), f"{capture} are not layers of a model that has {len(self.layers)}"
        features = jnp.concatenate(captured, axis=-1) if captured else None
        return Computed(residual.to_tokens(self.final_norm.after(x, y, residual)[1]), after, features)

    def _embedded(self, token_ids: jax.Array) -> jax.Array:
        """Return what the first layer reads of the tokens' embeddings."""
        found, config = self.embed(token_ids), self.config
        if config.rounds_embed_scale:
            found = found * jnp.asarray(config.embed_scale, found.dtype)
        else:
            found = scaled(found, config.embed_scale)
        if config.embed_norm:
            found = rms_norm(found, jnp.ones(config.hidden_size, found.dtype), config.rms_norm_eps)
        return found

    def _rotations(self, positions: jax.Array, lengths: jax.Array | None) -> list[Rotation]:
        """Return the rotation of every layer; equal ones are computed once."""
        found: dict[tuple[RopeConfig | None, int], Rotation] = {}
        growth = self.config.query_growth
        factor = None
        if growth is not None:
            beta, original = growth
            factor = 1 + beta * jnp.log1p(jnp.floor(positions.astype(jnp.float32) / original))
        layers = [self.config.layer(number) for number in range(len(self.layers))]
        for layer in layers:
            if (layer.rope, layer.head_dim) in found:
                continue
            if layer.rope is None:
                shape = (*positions.shape, layer.head_dim // 2)
                cos, sin = jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
            else:
                cos, sin = rope_cos_sin(layer.rope, layer.head_dim, positions, lengths)
            # Without the barrier, XLA would recompute them in every layer and for every head.
            cos, sin = lax.optimization_barrier((cos, sin))
            found[layer.rope, layer.head_dim] = Rotation(cos, sin, factor)
        return [found[layer.rope, layer.head_dim] for layer in layers]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits float32 [..., vocab] of hidden states [..., hidden] after the final norm."""
        return self._scaled(jnp.einsum("...h,vh->...v", hidden, self._words(), preferred_element_type=jnp.float32))

    def logits_by_word(self, hidden: jax.Array) -> jax.Array:
        """Return transposed logits float32 [vocab, Q] of hidden states [Q, hidden]; the table is the left operand."""
        return self._scaled(jnp.einsum("vh,qh->vq", self._words(), hidden, preferred_element_type=jnp.float32))

    def _scaled(self, logits: jax.Array) -> jax.Array:
        scale, cap = self.config.logit_scale, self.config.logit_cap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _words(self) -> jax.Array:
        """Return the table [vocab, hidden] of the output head."""
        return self.embed.embedding[...] if self.lm_head is None else self.lm_head.kernel[...]

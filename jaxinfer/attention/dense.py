"""Plain causal attention without a cache: for training, for test oracles and as the reference."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.heads import ProjectedHeads
from kernels_pallas.rotate_and_write.reference import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalAttend:
    """An `Attend` that runs `causal_attention` over all tokens, or within packed documents."""

    documents: jax.Array | None = None  # int32 [..., T]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        return causal_attention(*rotate(heads), self.documents), kv


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    """Compute attention in which every token sees itself and the tokens before it.

    Args:
        q: [..., T, num_heads, head_dim], not scaled yet.
        k, v: [..., T, num_kv_heads, head_dim].
        documents: int32 [..., T], optional ids of packed documents; tokens of different ids do not see each other.

    Returns:
        The output, shaped like q.
    """
    length = k.shape[-3]
    visible = jnp.tril(jnp.ones((length, length), bool))
    if documents is not None:
        visible = visible & (documents[..., :, None] == documents[..., None, :])
    return masked_attention(q, k, v, visible)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Compute attention in which a mask says which of the S keys each of the T queries sees.

    Args:
        q: [..., T, num_heads, head_dim], not scaled yet.
        k, v: [..., S, num_kv_heads, head_dim].
        visible: bool [..., T, S], with at least one key for every query.

    Returns:
        The output, shaped like q.
    """
    group = q.shape[-2] // k.shape[-2]
    q = q.reshape(*q.shape[:-2], k.shape[-2], group, q.shape[-1])
    scores = jnp.einsum("...qhgd,...khd->...hgqk", q, k, preferred_element_type=jnp.float32)
    visible = visible[..., None, None, :, :]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("...hgqk,...khd->...qhgd", weights, v)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])

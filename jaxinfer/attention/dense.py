"""Plain causal attention without a cache: for training, for test oracles and as the reference."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.heads import ProjectedHeads
from kernels_pallas.rotate_and_write.reference import rotate, rotate_queries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalAttend:
    """An `Attend` that runs `causal_attention` over all tokens, or within packed documents."""

    documents: jax.Array | None = None  # int32 [..., T]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        if heads.has_kv:
            q, k, v = rotate(heads)
        else:
            assert kv is not None, "the layer whose keys these heads read comes before"
            q, (k, v) = rotate_queries(heads), kv
        found = causal_attention(
            q, k, v, self.documents, window=heads.window, scale=heads.scale, cap=heads.cap, sinks=heads.sinks
        )
        return found, (k, v) if heads.keeps_kv else kv


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: jax.Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute attention in which every token sees itself and the tokens before it.

    Args:
        q: [..., T, num_heads, head_dim], not scaled yet.
        k, v: [..., T, num_kv_heads, head_dim].
        documents: int32 [..., T], optional ids of packed documents; tokens of different ids do not see each other. The
            tokens of a document are neighbours.
        window: number of tokens that a token sees at most, itself included; None: there is no limit.
        scale, cap, sinks: see `masked_attention`.

    Returns:
        The output, shaped like q.
    """
    length = k.shape[-3]
    visible = jnp.tril(jnp.ones((length, length), bool))
    if window is not None:
        visible = jnp.triu(visible, 1 - window)
    if documents is not None:
        visible = visible & (documents[..., :, None] == documents[..., None, :])
    return masked_attention(q, k, v, visible, scale=scale, cap=cap, sinks=sinks)


def masked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute attention in which a mask says which of the S keys each of the T queries sees.

    Args:
        q: [..., T, num_heads, head_dim], not scaled yet.
        k, v: [..., S, num_kv_heads, head_dim].
        visible: bool [..., T, S], with at least one key for every query.
        scale: factor of the scores; None: head_dim ** -0.5.
        cap: bound of the scaled scores x, which become cap * tanh(x / cap); None: there is no bound.
        sinks: [num_heads], for each head a score that every query sees beside the others and that has no value; it is
            neither scaled nor capped. None: there are none.

    Returns:
        The output, shaped like q.
    """
    group = q.shape[-2] // k.shape[-2]
    q = q.reshape(*q.shape[:-2], k.shape[-2], group, q.shape[-1])
    scores = jnp.einsum("...qhgd,...khd->...hgqk", q, k, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible[..., None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    weights = _softmax(scores, sinks).astype(v.dtype)
    out = jnp.einsum("...hgqk,...khd->...qhgd", weights, v)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the weights of scores [..., num_kv_heads, group, T, S], beside sinks [num_kv_heads * group] if any."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    last = sinks.astype(scores.dtype).reshape(*scores.shape[-4:-2], 1, 1)
    last = jnp.broadcast_to(last, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, last], axis=-1), axis=-1)[..., :-1]

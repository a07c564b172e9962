"""Merge of the results of a launch's splits, weighted by their sums of exponentials."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.branch_attention.tuning import Tuning


def merge(parts: jax.Array, log_weight: jax.Array, log_sinks: jax.Array | None = None) -> jax.Array:
    """Return the mean [T, H, D] of parts [S, T, H, D], given base-2 logarithms of their weights [S, T, H], and those of
    sinks [H], which are parts of zeros.

    The loop over splits is unrolled with a running maximum, so that the merge is elementwise and XLA makes one kernel
    of it; with the maximum of all splits first, it makes two if there are many splits.
    """
    total, top, weights = parts[0], log_weight[0], jnp.ones_like(log_weight[0])
    for part, log in zip(parts[1:], log_weight[1:], strict=True):
        new_top = jnp.maximum(top, log)
        shrink, weight = jnp.exp2(top - new_top), jnp.exp2(log - new_top)
        total = total * shrink[..., None] + weight[..., None] * part
        top, weights = new_top, weights * shrink + weight
    if log_sinks is not None:
        new_top = jnp.maximum(top, log_sinks)
        shrink = jnp.exp2(top - new_top)
        total, weights = total * shrink[..., None], weights * shrink + jnp.exp2(log_sinks - new_top)
    return total / weights[..., None]


def of_tokens(log_weight: jax.Array, block: jax.Array, place: jax.Array, group: int, tuning: Tuning) -> jax.Array:
    """Rearrange weights by block [S, B, Hkv, C, QUERY_ROWS] to weights by token [S, T, H].

    Args:
        block, place: int32 [T], the block of each token and its place in it.
    """
    splits, _, kv_heads = log_weight.shape[:3]
    consumer, index = jnp.divmod(place, tuning.tokens_per_consumer(group))
    row = (index[:, None] * group + jnp.arange(group))[:, None]  # [T, 1, G]
    head = jnp.arange(kv_heads)[None, :, None]
    by_token = log_weight[:, block[:, None, None], head, consumer[:, None, None], row]
    return by_token.reshape(splits, block.shape[0], kv_heads * group)


def of_decode_tokens(log_weight: jax.Array, rows: int, width: int, group: int, tuning: Tuning) -> jax.Array:
    """Rearrange like `of_tokens` for `rows` rows of `width` tokens: their places are static, so there is no gather."""
    splits, _, kv_heads, consumers = log_weight.shape[:4]
    tokens = tuning.tokens_per_consumer(group)
    by_row = log_weight[..., : tokens * group].reshape(splits, rows, -1, kv_heads, consumers, tokens, group)
    by_row = by_row.transpose(0, 1, 2, 4, 5, 3, 6).reshape(splits, rows, -1, kv_heads * group)
    return by_row[:, :, :width].reshape(splits, rows * width, kv_heads * group)

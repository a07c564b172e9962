"""A first layer that shifts every token by one position, so that a model that predicts the next token becomes one that
predicts the token at its own position.

An autoregressive model predicts at a token's position what comes next; a diffusion model of LLaDA's kind predicts the
position itself. With this layer before the others, an autoregressive model answers that question for the first of a
block's masks from the start, and training has the rest to teach.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from training.initialization import POSITION_PAIRS, Params

SHARPNESS = 3.0
"""Scale of q and k: what is one place off has e to the minus 14 of the weight, and nothing within the context more than
e to the minus 13."""


def with_shift(params: Params, config: ModelConfig, mask_token_id: int) -> Params:
    """Parameters whose layer 0 takes a token's embedding out of the residual stream and puts in the one before it.

    Heads find places by what all embeddings have in common. A group of heads has two: one looks back by a token, the
    other at its own place; the groups' values are slices of the embedding there. The mask's embedding is scaled to the
    others' length, so that what is written is as long as what it replaces.

    Raises:
        ValueError: the heads do not hold all features, or no direction is common to all embeddings.
    """
    heads, group, dim, hidden = config.num_kv_heads, config.group_size, config.head_dim, config.hidden_size
    if group != 2 or heads * dim != hidden:
        raise ValueError(f"{heads} groups of {group} heads of {dim} do not hold {hidden} features twice")
    table = np.array(params["embed.embedding"], np.float32)
    lengths = np.sqrt((table**2).mean(axis=1))
    length = float(np.delete(lengths, mask_token_id).mean())
    table[mask_token_id] *= length / lengths[mask_token_id]
    normed = table / np.sqrt((table**2).mean(axis=1, keepdims=True))
    common, *_ = np.linalg.lstsq(normed, np.ones(len(table), np.float32), rcond=None)
    if (normed @ common).min() <= 0:
        raise ValueError("no direction is common to all embeddings")

    half = dim // 2
    turns = config.rope.theta ** -(np.arange(POSITION_PAIRS) / half)
    qkv = np.zeros((heads, group + 2, dim, hidden), np.float32)
    out = np.zeros((hidden, heads, group, dim), np.float32)
    for distance, sign in ((1, 1.0), (0, -1.0)):
        member, query = 1 - distance, np.zeros(dim)
        query[:POSITION_PAIRS] = np.cos(turns * distance)
        query[half : half + POSITION_PAIRS] = -np.sin(turns * distance)
        qkv[:, member] = np.outer(query, common)
        for head in range(heads):
            out[head * dim : (head + 1) * dim, head, member] = sign * length * np.eye(dim)
    key = np.zeros(dim)
    key[:POSITION_PAIRS] = 1.0
    qkv[:, group] = np.outer(key, common)
    qkv[:, group + 1] = np.eye(hidden).reshape(heads, dim, hidden)
    layer = "layers.0.attention"
    shifted = {"embed.embedding": table, f"{layer}.qkv.kernel": qkv, f"{layer}.o.kernel": out}
    shifted |= {f"{layer}.{norm}.scale": np.full(dim, SHARPNESS, np.float32) for norm in ("q_norm", "k_norm")}
    assert all(params[name].shape == value.shape for name, value in shifted.items())
    return params | {name: jnp.asarray(value) for name, value in shifted.items()}

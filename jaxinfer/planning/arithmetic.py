"""Bytes and operations of a model, counted from its configuration; nothing is compiled or allocated.

All figures are those of one device: heads, the inner dimension and the vocabulary are split evenly over `devices`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp

from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.checkpoint.layout import head_layout
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.checkpoint.weight_map import MESH_AXIS, Parameter, parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.models.layer_config import LayerConfig

_EMBEDDING, _TABLE, _ROUTER = "embed.embedding", "per_layer.table", (".router.kernel", ".router.bias")


def weights_bytes(config: ModelConfig | Eagle3Config, dtype: jnp.dtype, *, devices: int = 1) -> int:
    """Return the bytes of all parameters.

    Raises:
        ValueError: the model cannot be split over so many devices.
    """
    return sum(_elements(p, devices) for p in _parameters(config, devices)) * jnp.dtype(dtype).itemsize


def token_bytes(config: ModelConfig, dtype: jnp.dtype, *, devices: int = 1) -> int:
    """Return the bytes of the K and V of one token.

    Raises:
        ValueError: the model cannot be split over so many devices.
    """
    return kv_bytes_per_token(for_tensor_parallel(config, devices), dtype) // devices


def decode_bytes(config: ModelConfig, dtype: jnp.dtype, *, rows: int, visible_tokens: int, devices: int = 1) -> int:
    """Return the least bytes that a decode step of `rows` tokens reads: weights once, and the KV that the tokens see.

    A layer with a window reads the KV within it. Of embedding tables only the rows of the tokens are read, unless one
    is the output head too. Of the experts only those that tokens go to are read: the expected number of distinct ones
    if all are equally likely.
    """
    itemsize = jnp.dtype(dtype).itemsize
    tables = (_TABLE,) if config.tie_word_embeddings else (_TABLE, _EMBEDDING)
    read = [p for p in _parameters(config, devices) if p.path not in tables]
    of_tokens = rows * (config.hidden_size + config.num_layers * config.per_layer_size)
    weights = sum(_elements(p, devices) * _read_of_experts(config, p, rows) for p in read) + of_tokens
    split = for_tensor_parallel(config, devices)
    seen = sum(
        _kv_elements(layer) * min(visible_tokens, rows * (layer.window or visible_tokens)) for layer in split.all_layers
    )
    return (round(weights) + seen // devices) * itemsize


def outside_windows_bytes(config: ModelConfig, dtype: jnp.dtype, *, length: int, devices: int = 1) -> int:
    """Return the bytes of the K and V of a sequence of `length` tokens that its next token does not see."""
    layers = for_tensor_parallel(config, devices).kv_layers
    unseen = sum(_kv_elements(layer) * max(0, length - layer.window) for layer in layers if layer.window is not None)
    return unseen * jnp.dtype(dtype).itemsize // devices


def _kv_elements(layer: LayerConfig) -> int:
    return 2 * layer.num_kv_heads * layer.head_dim


def product_operations(config: ModelConfig, *, tokens: int, logits: int) -> int:
    """Return the floating-point operations (a multiplication and an addition are two) of a step's weight products."""
    kernels = sum(
        math.prod(p.shape) * _used_of_experts(config, p)
        for p in parameters(config)
        if p.path.endswith("kernel") and "layers" in p.path
    )
    return 2 * (tokens * round(kernels) + logits * config.vocab_size * config.hidden_size)


def prefill_operations(config: ModelConfig, *, tokens: int, prompt_len: int, devices: int = 1) -> int:
    """Return the floating-point operations of a step that computes `tokens` tokens: whole prompts of `prompt_len`
    tokens, and a shorter one for the rest.

    They are the products with weights, attention of every token over those up to itself, and the logits of each
    prompt's last token.
    """
    prompts = [prompt_len] * (tokens // prompt_len) + ([tokens % prompt_len] if tokens % prompt_len else [])
    attention = sum(
        4 * layer.num_heads * layer.head_dim * sum(_pairs(length, layer.window) for length in prompts)
        for layer in config.all_layers
    )
    return (product_operations(config, tokens=tokens, logits=len(prompts)) + attention) // devices


def _pairs(length: int, window: int | None) -> int:
    """Return how many tokens those of a prompt see, counted for each of them."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _used_of_experts(config: ModelConfig, parameter: Parameter) -> float:
    """Return the share of a parameter that a token is multiplied with."""
    if config.experts is None or "e" not in parameter.axes or parameter.path.endswith(_ROUTER):
        return 1
    return config.experts.experts_per_token / config.experts.num_experts


def _read_of_experts(config: ModelConfig, parameter: Parameter, rows: int) -> float:
    """Return the share of a parameter that `rows` tokens are multiplied with."""
    return 1 - (1 - used) ** rows if (used := _used_of_experts(config, parameter)) < 1 else 1


def _parameters(config: ModelConfig | Eagle3Config, devices: int) -> tuple[Parameter, ...]:
    if isinstance(config, Eagle3Config):
        return parameters(head_layout(replace(config, layer=for_tensor_parallel(config.layer, devices))))
    return parameters(for_tensor_parallel(config, devices))


def _elements(parameter: Parameter, devices: int) -> int:
    return math.prod(parameter.shape) // (devices if MESH_AXIS in parameter.spec else 1)

"""Tensor parallelism over more devices than key/value heads: each head is replicated on several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxinfer.checkpoint.weight_map import Parameter
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layer_config import LayerConfig


def for_tensor_parallel(config: ModelConfig, size: int) -> ModelConfig:
    """Return the configuration that `size` devices compute: `config`, or one with each key/value head replicated.

    With more devices than key/value heads, every head is replicated on `size / num_kv_heads` devices and its group of
    query heads is split among them; the model's output is the same.

    Raises:
        ValueError: a dimension cannot be split evenly; the message names the field.
    """
    split = {name: getattr(config, name) for name in ("vocab_size", "intermediate_size", "num_heads")}
    if config.experts is not None:
        # Every device has a share of each expert, so that the load is equal whichever experts are chosen.
        split["moe_intermediate_size"] = config.experts.intermediate_size
        split["the shared experts' size"] = config.experts.shared_size
    for name, value in split.items():
        if value % size:
            raise ValueError(f"tensor_parallel_size={size} does not divide {name}={value}")
    heads = {layer: _kv_heads(layer, size) for layer in (config.common_layer, *config.layers)}
    layers = tuple(dataclasses.replace(layer, num_kv_heads=heads[layer]) for layer in config.layers)
    return dataclasses.replace(config, num_kv_heads=heads[config.common_layer], layers=layers)


def _kv_heads(layer: LayerConfig, size: int) -> int:
    """Return the number of key/value heads of a layer on so many devices, replicas included."""
    if layer.num_heads % size:
        raise ValueError(f"tensor_parallel_size={size} does not divide num_heads={layer.num_heads}")
    if layer.num_kv_heads % size == 0:
        return layer.num_kv_heads
    if size % layer.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={size} neither divides nor is a multiple of num_kv_heads={layer.num_kv_heads}"
        )
    return size


def regrouping(before: Parameter, after: Parameter) -> tuple[Any, ...]:
    """Return the index that maps a checkpoint's parameter to its layout with more key/value heads.

    Their number is a multiple of the parameter's. In the fused projection [kv, g + 2, d, h], or its bias, every new
    head gets its share of an old head's queries, and the old head's k and v; in the output projection [h, kv, g, d],
    gates [kv, g, ...], sinks [kv, g] and scales [kv, g, d] of queries it gets the same share. A scale [kv, d] of keys
    is repeated. Other parameters do not change.
    """
    if "kv" not in before.axes:
        return (...,)
    axis = before.axes.index("kv")
    heads, more = before.shape[axis], after.shape[axis]
    repeats, lead = more // heads, (slice(None),) * axis
    head, part = np.divmod(np.arange(more), repeats)
    if before.axes[axis + 1] not in ("slot", "g"):
        return (*lead, head)
    rows, fewer = before.shape[axis + 1], after.shape[axis + 1]
    # Each head has a share of the queries, and all of the rest, which is k and v.
    share = 0 if repeats == 1 else (rows - fewer) // (repeats - 1)
    shared = fewer - share
    queries = part[:, None] * share + np.arange(share)
    others = np.broadcast_to(np.arange(rows - shared, rows), (more, shared))
    return (*lead, head[:, None], np.concatenate([queries, others], axis=1))


def spread(array: Any, before: Parameter, after: Parameter) -> Any:
    """Return a checkpoint's parameter in its layout with more key/value heads; as it is if it has no more."""
    return array if before.shape == after.shape else array[regrouping(before, after)]

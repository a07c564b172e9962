"""Tensor parallelism over more devices than key/value heads: each head is replicated on several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxinfer.checkpoint.weight_map import Parameter
from jaxinfer.models.config import ModelConfig


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
    if config.num_kv_heads % size == 0:
        return config
    if size % config.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={size} neither divides nor is a multiple of num_kv_heads={config.num_kv_heads}"
        )
    return dataclasses.replace(config, num_kv_heads=size)


def regrouping(parameter: Parameter, num_kv_heads: int) -> tuple[Any, ...]:
    """Return the index that maps a checkpoint's parameter to its layout with `num_kv_heads` key/value heads.

    `num_kv_heads` is a multiple of the parameter's heads. In the fused projection [kv, g + 2, d, h], or its bias, every
    new head gets its share of an old head's queries, and the old head's k and v; in the output projection
    [h, kv, g, d] it gets the same share. Other parameters do not change.
    """
    if "kv" not in parameter.axes:
        return (...,)
    axis = parameter.axes.index("kv")
    heads, rows = parameter.shape[axis : axis + 2]
    shared = 2 if "slot" in parameter.axes else 0  # k and v
    repeats = num_kv_heads // heads
    share = (rows - shared) // repeats
    head, part = np.divmod(np.arange(num_kv_heads), repeats)
    queries = part[:, None] * share + np.arange(share)
    others = np.broadcast_to(np.arange(rows - shared, rows), (num_kv_heads, shared))
    return (slice(None),) * axis + (head[:, None], np.concatenate([queries, others], axis=1))

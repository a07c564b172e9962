"""Models that are given as they live in a trainer: checked, and placed where the engine computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxinfer.checkpoint.incoming import check_leaves, leaves_of_tree
from jaxinfer.checkpoint.load import module_around, tensor_size
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel, spread
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM


def config_of_live(model: Any) -> ModelConfig:
    """Return the configuration of a module, or of a pair of configuration and state.

    Raises:
        ValueError: it is neither.
    """
    config = model[0] if isinstance(model, tuple) and len(model) == 2 else getattr(model, "config", None)
    if not isinstance(config, ModelConfig) or (isinstance(model, nnx.Module) and not isinstance(model, DecoderLM)):
        raise ValueError(
            "model must be the name of a checkpoint, a module that load_checkpoint or build_model makes, or a pair of "
            f"ModelConfig and its state, got {type(model).__name__}"
        )
    return config


def placed_live(model: Any, *, dtype: jnp.dtype | None, mesh: Mesh | None) -> tuple[DecoderLM, list[bool]]:
    """Return a module around the arrays of a live model, and of each leaf whether it is the caller's own array.

    Arrays are used as they are where type and placement fit; others are copied.

    Args:
        dtype: of weights; None: as they are.

    Raises:
        ValueError: arrays are missing or unknown, or have another shape than the configuration says, or several types.
    """
    config = config_of_live(model)
    leaves = leaves_of_tree(model[1] if isinstance(model, tuple) else model)
    stored, final = parameters(config), parameters(for_tensor_parallel(config, tensor_size(mesh)))
    check_leaves({path: jnp.shape(leaf) for path, leaf in leaves.items()}, {each.path: each.shape for each in stored})
    if dtype is None:
        found = {leaves[each.path].dtype for each in stored if each.dtype is None}
        if len(found) > 1:
            raise ValueError(f"the weights have types {', '.join(sorted(map(str, found)))}: give dtype=...")
        dtype = jnp.dtype(found.pop())
    arrays, lent = {}, {}
    for before, after in zip(stored, final, strict=True):
        given = leaves[before.path]
        sharding = SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, after.spec)
        fits = isinstance(given, jax.Array) and given.dtype == (before.dtype or dtype) and before.shape == after.shape
        if fits and given.sharding.is_equivalent_to(sharding, given.ndim):
            arrays[before.path], lent[before.path] = given, True
            continue
        moved = jax.device_put(spread(given, before, after), sharding)
        arrays[before.path] = jnp.copy(moved).astype(before.dtype or dtype)  # where the placement alone fits, too
        lent[before.path] = False
    effective = dataclasses.replace(for_tensor_parallel(config, tensor_size(mesh)), dtype=str(dtype))
    module = module_around(effective, arrays)
    return module, [lent[path] for path in leaves_of_tree(module)]

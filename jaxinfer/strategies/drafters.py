"""Draft models and heads: selection, the check that one fits the target, and loading."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.checkpoint.directory import embedded_checkpoint, find_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.unknown_fields import ConfigOptions
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.strategies.speculator import Speculator


def with_drafter(config: SpeculativeConfig, target: Path | None) -> SpeculativeConfig:
    """Return the configuration with a model: its own, or the embedded one if `target` is the embedded target.

    Args:
        target: the target's checkpoint; None: it was given by its arrays.

    Raises:
        ValueError: it names no model, and `target` is not the embedded target.
        FileNotFoundError: there is no such model.
    """
    method = config.row
    if method.model is None:
        return config
    if config.model is not None:
        return dataclasses.replace(config, model=find_checkpoint(config.model))
    if method.embedded is None or target is None or target.resolve() != embedded_checkpoint().resolve():
        of_embedded = f": the embedded {method.model} belongs to the embedded target, not to {target or 'this one'}"
        raise ValueError(
            f"method={config.method!r} needs model=..., {method.model_words}"
            + (of_embedded if method.embedded is not None else "")
        )
    return dataclasses.replace(config, model=embedded_checkpoint(method.embedded))


def check_drafter(
    config: SpeculativeConfig,
    target: Path | None,
    target_config: ModelConfig,
    max_model_len: int,
    **options: Unpack[ConfigOptions],
) -> Any:
    """Return the configuration of a method's model, as far as it can be known before the target is loaded.

    Args:
        target: a directory with the target's tokenizer; None: there is none.
        target_config: the target's configuration.
        options: as for `read_config`.

    Raises:
        ValueError: the model does not fit the target; the message says what differs.
    """
    return config.row.device.check(config, target, target_config, max_model_len, **options)


def load_speculator(
    config: SpeculativeConfig,
    target: ModelConfig,
    drafter: Any,
    *,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    **options: Unpack[ConfigOptions],
) -> Speculator:
    """Load the method's model and return the `Speculator` of the configuration.

    Args:
        drafter: the result of `check_drafter`.
        options: as for `load_checkpoint`.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError, ValueError: as for `load_checkpoint`, `load_head`.
    """
    return Speculator(config, config.row.device.load(config, target, drafter, dtype=dtype, mesh=mesh, **options))

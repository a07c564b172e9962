"""Where new weights come from: what `update_weights` is given, as leaves of the engine's models."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.checkpoint.directory import find_checkpoint
from jaxinfer.checkpoint.incoming import (
    assembled_model,
    check_leaves,
    check_same_model,
    leaves_of_directory,
    leaves_of_tree,
    regrouped,
)
from jaxinfer.checkpoint.load import tensor_size
from jaxinfer.engine.weights import DRAFTER_MODEL, TARGET_MODEL, EngineWeights
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.unknown_fields import ConfigOptions
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.strategies.drafters import check_drafter


@dataclasses.dataclass(frozen=True)
class WeightsSource:
    """What the weights of an engine were loaded with.

    Attributes:
        config: the target's configuration, as its checkpoint has it.
        weights: the target's checkpoint; None: it was given by its arrays.
        tokenizer: a directory with the target's tokenizer; None: there is none.
        speculative: of an engine that drafts, with the drafter's checkpoint.
    """

    config: ModelConfig
    weights: Path | None
    tokenizer: Path | None
    dtype: jnp.dtype
    mesh: Mesh | None
    options: ConfigOptions
    speculative: SpeculativeConfig | None
    max_model_len: int

    def update(self, engine: EngineWeights, weights: Any, version: Any, model: str) -> None:
        """Give an engine new weights; arguments and errors are those of `LLM.update_weights`."""
        engine.check_alone()
        wanted = engine.of(model)
        if isinstance(weights, (str, os.PathLike)):
            if model == DRAFTER_MODEL:
                engine.update(leaves_of_tree(self._drafter(weights)), version, model, is_lent=False)
                return
            config, shapes, leaves = leaves_of_directory(weights, self.mesh, dtype=self.dtype, **self.options)
            check_same_model(config, self.config, str(weights))
            check_leaves(shapes, wanted.shapes_of_leaves)
            engine.update(leaves, version, model, is_lent=False)
        elif isinstance(weights, (nnx.Module, Mapping, list, tuple)) and not _are_named(weights):
            leaves = leaves_of_tree(weights)
            if model == TARGET_MODEL:
                leaves = regrouped(leaves, self.config, tensor_size(self.mesh))
            engine.update(leaves, version, model, is_lent=True)
        elif isinstance(weights, Iterable):
            if model == TARGET_MODEL:
                leaves = assembled_model(weights, self.config, self.dtype, self.mesh)
            else:
                leaves = self._assembled_drafter(weights)
            engine.update(leaves, version, model, is_lent=False)
        else:
            raise ValueError(
                "weights must be an nnx module or state, a nested dict of arrays, an iterator of (name, array) or a "
                f"directory, got {type(weights).__name__}"
            )

    def reload(self, engine: EngineWeights) -> None:
        """Read dropped weights again, of models that were not updated since they were loaded."""
        if self.weights is not None and TARGET_MODEL not in engine.updated:
            _, _, leaves = leaves_of_directory(self.weights, self.mesh, dtype=self.dtype, **self.options)
            engine.update(leaves, None, TARGET_MODEL, is_lent=False, is_reload=True)
        model = None if self.speculative is None else self.speculative.model
        if model is not None and DRAFTER_MODEL not in engine.updated:
            leaves = leaves_of_tree(self._drafter(model))
            engine.update(leaves, None, DRAFTER_MODEL, is_lent=False, is_reload=True)

    def _assembled_drafter(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        assert self.speculative is not None and self.speculative.model is not None
        config, checked = self._checked_drafter(self.speculative.model)
        return config.row.device.assembled(
            config, self.config, checked, tensors, dtype=self.dtype, mesh=self.mesh, **self.options
        )

    def _drafter(self, path: str | os.PathLike[str]) -> nnx.Module:
        config, checked = self._checked_drafter(path)
        return config.row.device.load(config, self.config, checked, dtype=self.dtype, mesh=self.mesh, **self.options)

    def _checked_drafter(self, path: str | os.PathLike[str]) -> tuple[SpeculativeConfig, Any]:
        assert self.speculative is not None
        config = dataclasses.replace(self.speculative, model=find_checkpoint(path))
        return config, check_drafter(config, self.tokenizer, self.config, self.max_model_len, **self.options)


def _are_named(weights: Any) -> bool:
    """Whether these are pairs of a name and an array."""
    return (
        isinstance(weights, (list, tuple))
        and len(weights) > 0
        and all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in weights)
    )

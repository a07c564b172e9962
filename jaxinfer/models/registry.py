"""Model classes by architecture: one subclass of `DecoderLM` for each family."""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.families import FAMILIES, Family


def _class_of(family: Family) -> type[DecoderLM]:
    names = {"__doc__": family.summary, "__module__": __name__}
    return types.new_class(family.architecture, (DecoderLM,), exec_body=lambda namespace: namespace.update(names))


MODELS = {name: _class_of(family) for name, family in FAMILIES.items()}


def __getattr__(name: str) -> Any:
    if name in MODELS:
        return MODELS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_model(config: ModelConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None) -> DecoderLM:
    """Build a randomly initialised model of `config`; wrap in `nnx.eval_shape` for shapes only.

    Raises:
        UnsupportedConfigError: the architecture has no class here.
    """
    if config.architecture not in MODELS:
        raise UnsupportedConfigError(f"unknown architecture {config.architecture!r}; supported: {', '.join(MODELS)}")
    return MODELS[config.architecture](config, dtype=dtype, rngs=rngs or nnx.Rngs(0))

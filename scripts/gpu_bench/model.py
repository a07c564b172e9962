"""Models of the benchmark's shapes on the device, with the weights of `weights.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gpu_bench.weights import factor, fraction, salt, scrambled
from jaxinfer.checkpoint.weight_map import Placement, placements
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model


def formula_model(values: Mapping[str, Any], *, dtype: Any = jnp.bfloat16) -> DecoderLM:
    """The model of a `config.json`, computed on the device parameter by parameter."""
    config = ModelConfig.from_hf(values)
    sources: dict[str, list[Placement]] = {}
    for placement in placements(config):
        sources.setdefault(placement.target.path, []).append(placement)
    abstract = nnx.eval_shape(lambda: build_model(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = {
        path: variable.replace(_parameter(sources[".".join(map(str, path))], variable.shape, variable.dtype))
        for path, variable in nnx.to_flat_state(state)
    }
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _parameter(sources: list[Placement], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A parameter out of the tensors that share it. Parameters of one form share a program: salts are arguments."""
    forms = tuple(
        (
            source.source_shape,
            factor(source.source, source.source_shape),
            tuple((part.start, part.stop) for part in source.part),
            source.grouped_shape,
            source.order,
        )
        for source in sources
    )
    salts = np.asarray([salt(source.source) for source in sources], np.uint32)
    return _assemble(salts, forms=forms, shape=tuple(shape), dtype=jnp.dtype(dtype))


@partial(jax.jit, static_argnames=("forms", "shape", "dtype"))
def _assemble(salts: jax.Array, *, forms: tuple[Any, ...], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    out = jnp.zeros(shape, dtype)
    for index, (source_shape, width, part, grouped, order) in enumerate(forms):
        tensor = _tensor(salts[index], source_shape, width).astype(dtype).reshape(grouped).transpose(order)
        out = out.at[tuple(slice(*bounds) for bounds in part)].set(tensor)
    return out


def _tensor(salt: jax.Array, shape: tuple[int, ...], width: float | None) -> jax.Array:
    """float32, in the layout of a Hugging Face checkpoint."""
    if width is None:
        return jnp.ones(shape, jnp.float32)
    index = jax.lax.iota(jnp.uint32, int(np.prod(shape)))
    bits = scrambled(index, salt, wrap=lambda x: x)
    return (fraction(bits.astype(jnp.float32)) * jnp.float32(width)).reshape(shape)

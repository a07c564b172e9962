"""Tiny block-diffusion models and engines for tests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.denoising import BlockDiffusion, Denoiser
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from tests.builders import model_config

MASK, BLOCK = 100, 4


def diffusion_model_config(family: str = "SDARForCausalLM", **overrides: Any) -> ModelConfig:
    return model_config(family, **{"block_size": BLOCK, "mask_token_id": MASK, **overrides})


def diffusion_engine(model: DecoderLM, config: DiffusionConfig | None = None, **limits: Any) -> EngineCore:
    """`tests.builders.make_engine` that denoises blocks. Random models are never sure: by default a probability of 0.1
    is enough."""
    engine = EngineConfig(
        **{
            "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8,
            "kv_cache_tokens": 256, **limits,
        }
    )  # fmt: skip
    config = config or DiffusionConfig(threshold=0.1, expected_tpf=1)
    dtype = jnp.dtype(jnp.float32)
    make_strategy = Denoiser(config).strategy(engine, model, dtype=dtype, mesh=None)
    return EngineCore(model, engine, dtype=dtype, make_strategy=make_strategy)


def diffusion_of(core: EngineCore) -> BlockDiffusion:
    """The strategy of such an engine."""
    assert isinstance(core.strategy, BlockDiffusion)
    return core.strategy

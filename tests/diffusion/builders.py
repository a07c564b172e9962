"""Tiny block-diffusion models, engines and requests for tests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import Request
from jaxinfer.strategies.block_diffusion import BlockDiffusion
from jaxinfer.strategies.choose import denoiser_of
from tests.builders import make_request, model_config, random_prompts
from tests.diffusion import oracle
from tests.sampling.reference import Filters

MASK, BLOCK = 100, 4


def diffusion_model_config(family: str = "SDARForCausalLM", **overrides: Any) -> ModelConfig:
    return model_config(family, **{"block_size": BLOCK, "mask_token_id": MASK, **overrides})


def diffusion_engine(model: DecoderLM, config: DiffusionConfig | None = None, **limits: Any) -> EngineCore:
    """`tests.builders.make_engine` of a diffusion model. Random models are never sure: by default a probability of 0.1
    is enough."""
    engine = EngineConfig(
        **{
            "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8,
            "kv_cache_tokens": 256, **limits,
        }
    )  # fmt: skip
    config = config or DiffusionConfig(threshold=0.1, expected_tpf=1)
    dtype = jnp.dtype(jnp.float32)
    make_strategy = denoiser_of(config, model.config).strategy(engine, model, dtype=dtype, mesh=None)
    return EngineCore(model, engine, dtype=dtype, make_strategy=make_strategy)


def diffusion_of(core: EngineCore) -> BlockDiffusion:
    """The strategy of such an engine."""
    assert isinstance(core.strategy, BlockDiffusion)
    return core.strategy


def sure_of_masks(model: DecoderLM) -> DecoderLM:
    """The model, which thinks masks likelier than nearly everything from now on."""
    assert model.lm_head is not None
    kernel = np.array(model.lm_head.kernel[...])
    kernel[MASK] = kernel[:MASK].max(axis=0)
    model.lm_head.kernel[...] = jnp.asarray(kernel)
    return model


def requests(**more: Any) -> list[Request]:
    """Greedy and sampled, prompts that end in and between blocks, whole and partial last blocks."""
    return [
        make_request(str(i), prompt, max_tokens=24 - i, seed=i, temperature=i % 3 / 2, **more)
        for i, prompt in enumerate(random_prompts((60, 64, 9, 50, 70, 31, 2), vocab_size=MASK))
    ]


def generated(model: DecoderLM, request: Request, rule: oracle.Rule | None = None, **more: Any) -> oracle.Generated:
    """What the loop makes of a request."""
    params = request.sampling_params
    filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
    return oracle.generate(
        model, request.prompt_token_ids, params.max_tokens or 0, rule or oracle.by_threshold(0.1),
        filters=filters, request_key=request.request_key, eos=sorted(request.ending_token_ids), **more,
    )  # fmt: skip


def replace_ending(request: Request, token: int) -> Request:
    """Return a copy of the request that ends with this token."""
    params = request.sampling_params
    return make_request(
        request.request_id, request.prompt_token_ids, max_tokens=params.max_tokens or 0, seed=params.seed,
        temperature=params.temperature, eos_token_ids=[token],
    )  # fmt: skip

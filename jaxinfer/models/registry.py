"""From a configuration to its model class."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.bailing import BailingMoeForCausalLM, BailingMoeV2ForCausalLM
from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.llada import LLaDAModelLM, LLaDAMoEModelLM
from jaxinfer.models.llada2 import LLaDA2MoeModelLM
from jaxinfer.models.llama import LlamaForCausalLM
from jaxinfer.models.qwen2 import Qwen2ForCausalLM
from jaxinfer.models.qwen3 import Qwen3ForCausalLM
from jaxinfer.models.qwen3_moe import Qwen3MoeForCausalLM
from jaxinfer.models.sdar import SDARForCausalLM

MODELS: dict[str, type[DecoderLM]] = {
    cls.__name__: cls
    for cls in (
        LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SDARForCausalLM, Qwen3MoeForCausalLM,
        BailingMoeForCausalLM, BailingMoeV2ForCausalLM, LLaDA2MoeModelLM, LLaDAModelLM,
        LLaDAMoEModelLM,
    )
}  # fmt: skip


def build_model(config: ModelConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None) -> DecoderLM:
    """A randomly initialised model of `config`; wrap in `nnx.eval_shape` for shapes only.

    Raises:
        UnsupportedConfigError: the architecture has no class here.
    """
    if config.architecture not in MODELS:
        raise UnsupportedConfigError(f"unknown architecture {config.architecture!r}; supported: {', '.join(MODELS)}")
    return MODELS[config.architecture](config, dtype=dtype, rngs=rngs or nnx.Rngs(0))

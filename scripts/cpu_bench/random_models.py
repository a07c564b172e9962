"""Random checkpoints to measure on: shapes of real models, weights under which greedy decoding wanders."""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.checkpoint.export import export_hf
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model

# Embeddings are small beside the layers' outputs in the residual stream: with tied weights, a model whose embeddings
# are large repeats its last token for ever.
_EMBEDDING_STD = 0.1


def qwen3_config(
    *, num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int,
    vocab_size: int, max_position_embeddings: int = 2048,
) -> ModelConfig:  # fmt: skip
    """A Qwen3 with tied embeddings and no end of sequence."""
    return ModelConfig.from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "intermediate_size": intermediate_size,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
    )


def random_model(config: ModelConfig, *, seed: int = 0) -> DecoderLM:
    """A float32 model of `config` on the host, the same for the same seed; kernels keep the size of what they map."""
    rng = np.random.default_rng(seed)

    def fill(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        name, shape = ".".join(map(str, path)), leaf.shape
        if name.endswith("scale"):
            return np.ones(shape, np.float32)
        if name.endswith("embedding"):
            std = _EMBEDDING_STD
        else:
            # What a kernel maps from: its last axis, or for the attention's output all axes of the heads.
            inputs = int(np.prod(shape[1:])) if ".attention.o." in name else shape[-1]
            std = inputs**-0.5
        return rng.standard_normal(shape, np.float32) * np.float32(std)

    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    flat = {path: leaf.replace(fill(path, leaf)) for path, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def write_random_checkpoint(directory: str | os.PathLike[str], config: ModelConfig, *, seed: int = 0) -> None:
    """A Hugging Face directory, without tokenizer, of `random_model(config, seed=seed)` in float32."""
    export_hf(random_model(config, seed=seed), config, directory)

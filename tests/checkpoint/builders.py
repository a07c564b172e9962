"""Tiny configurations and random models for the tests of checkpoints."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.checkpoint import export_hf
from jaxinfer.checkpoint.export import hf_config
from jaxinfer.checkpoint.weight_map import placements
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.registry import build_model
from jaxinfer.models.rope import RopeConfig
from tests.hf_fixtures import NAMES

# Every dimension differs from every other, so that no mixed-up axes can fit.
_SHAPE = {
    "vocab_size": 40, "hidden_size": 22, "intermediate_size": 26, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2,
    "head_dim": 10, "max_position_embeddings": 64,
}  # fmt: skip


def tiny_config(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelConfig:
    """A small configuration of a family, with other fields replaced."""
    maximum = fields.get("max_position_embeddings", _SHAPE["max_position_embeddings"])
    rope = RopeConfig(max_position_embeddings=maximum, original_max_position_embeddings=maximum)
    family = {"qkv_bias": architecture == "Qwen2ForCausalLM", "qk_norm": architecture == "Qwen3ForCausalLM"}
    return ModelConfig(architecture, **({"rope": rope} | _SHAPE | family | fields))


PARTIAL_ROPE = RopeConfig(max_position_embeddings=64, original_max_position_embeddings=64, partial_rotary_factor=0.4)
GROUPED_EXPERTS = ExpertsConfig(
    num_experts=8, experts_per_token=2, intermediate_size=14, shared_size=14, dense_layers=(0,), score="sigmoid",
    has_bias=True, scaling=2.5, num_groups=4, kept_groups=2,
)  # fmt: skip
FAMILY_CONFIGS = {
    "llama": tiny_config(),
    "llama_tied": tiny_config(tie_word_embeddings=True),
    "llama_biases": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen2": tiny_config("Qwen2ForCausalLM"),
    "qwen2_tied": tiny_config("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen3": tiny_config("Qwen3ForCausalLM"),
    "qwen3_biases": tiny_config("Qwen3ForCausalLM", qkv_bias=True, o_bias=True, num_kv_heads=6),
    "qwen3_moe": tiny_config("Qwen3MoeForCausalLM", qk_norm=True, experts=ExpertsConfig(4, 2, 14, dense_layers=(0,))),
    "ling": tiny_config("BailingMoeForCausalLM", qkv_bias=True, experts=ExpertsConfig(4, 2, 14, shared_size=28)),
    "ling_2": tiny_config("BailingMoeV2ForCausalLM", qk_norm=True, rope=PARTIAL_ROPE, experts=GROUPED_EXPERTS),
    # Their hidden sizes are those of all heads.
    "llada": tiny_config("LLaDAModelLM", hidden_size=60, mask_token_id=39),
    "llada_tied": tiny_config("LLaDAModelLM", hidden_size=60, mask_token_id=39, tie_word_embeddings=True),
    "llada_moe": tiny_config(
        "LLaDAMoEModelLM", hidden_size=60, mask_token_id=39, qk_norm=True,
        experts=ExpertsConfig(4, 2, 14, shared_size=18, dense_layers=(0,), normalizes=False),
    ),
}  # fmt: skip

# Fixtures of transformers, one for each way of storing tensors; the others have the same tensors in other sizes.
_STORED = (
    "gemma3", "gemma4", "gemma4_e2b", "gemma4_moe", "glm4", "glm4_moe", "gpt_oss", "gpt_oss_mxfp4", "hunyuan_v1_dense",
    "laguna", "llama3_tied", "llama_biases_yarn", "minimax_m2", "mixtral", "muse_glimmer", "olmo3", "phi3_longrope",
    "qwen2_linear_sharded", "qwen2_moe", "qwen2_tied", "qwen3_dynamic", "qwen3_moe", "qwen3_moe_mixed",
    "qwen3_yarn_tied",
)  # fmt: skip
EVERY_FIXTURE = [pytest.param(name, marks=() if name in _STORED else pytest.mark.slow) for name in NAMES]


def random_model(config: ModelConfig, dtype: Any = jnp.float32, seed: int = 0) -> DecoderLM:
    """A model of `config` with normally distributed parameters, biases and scales too."""
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, dtype=dtype)))
    flat = {
        path: leaf.replace(jnp.asarray(rng.standard_normal(leaf.get_value().shape, np.float32), dtype))
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.merge(graph, nnx.from_flat_state(flat))


def parameters_of(model: nnx.Module) -> dict[str, np.ndarray]:
    """Every parameter by its path, on the host."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def write_checkpoint(directory: Any, config: ModelConfig | None = None, **options: Any) -> DecoderLM:
    """A random model in a new Hugging Face directory; returns it."""
    config = config or tiny_config()
    model = random_model(config)
    export_hf(model, config, directory, **options)
    return model


def assert_same_parameters(left: nnx.Module, right: nnx.Module) -> None:
    """Both models have the same parameters, bit for bit and dtype for dtype."""
    ours, theirs = parameters_of(left), parameters_of(right)
    assert ours.keys() == theirs.keys()
    for path, values in ours.items():
        assert values.dtype == theirs[path].dtype, path
        np.testing.assert_array_equal(values, theirs[path], err_msg=path)


def write_large_checkpoint(directory: Path, num_layers: int = 7) -> tuple[int, int]:
    """Random bfloat16 weights of 256 MB in many tensors; returns the bytes of the largest and of all of them."""
    config = tiny_config(
        vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=8, head_dim=64,
        num_layers=num_layers,
    )  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf_config(config)))
    sizes = {p.source: 2 * math.prod(p.source_shape) for p in placements(config)}
    header, offset = {}, 0
    for placement in placements(config):
        end = offset + sizes[placement.source]
        header[placement.source] = {
            "dtype": "BF16",
            "shape": placement.source_shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size in sizes.values():
            file.write(rng.bytes(size))
    return max(sizes.values()), offset

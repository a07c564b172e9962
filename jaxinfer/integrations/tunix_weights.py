"""Architectures and weights of tunix's models, as this engine has them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.checkpoint.incoming import leaves_of_tree
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import RopeConfig

# Class of a tunix model -> architecture, and the switches that it has on.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama3": ("LlamaForCausalLM", {}),
    "Qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "Qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}
# A path in a tunix model -> a Hugging Face name, and what makes its tensor of the array.
_NAMES: tuple[tuple[str, str, Callable[[jax.Array], jax.Array]], ...] = (
    (r"embedder\.input_embedding", "model.embed_tokens.weight", lambda x: x),
    (r"final_norm\.w", "model.norm.weight", lambda x: x),
    (r"lm_head\.w", "lm_head.weight", lambda x: x.T),
    (r"layers\.(\d+)\.(input|post_attention)_layernorm\.w", "model.layers.{}.{}_layernorm.weight", lambda x: x),
    (r"layers\.(\d+)\.attn\.([qkv])_proj\.w", "model.layers.{}.self_attn.{}_proj.weight",
     lambda x: x.reshape(x.shape[0], -1).T),
    (r"layers\.(\d+)\.attn\.([qkv])_bias", "model.layers.{}.self_attn.{}_proj.bias", lambda x: x.reshape(-1)),
    (r"layers\.(\d+)\.attn\.([qk])_norm\.w", "model.layers.{}.self_attn.{}_norm.weight", lambda x: x),
    (r"layers\.(\d+)\.attn\.o_proj\.w", "model.layers.{}.self_attn.o_proj.weight",
     lambda x: x.reshape(-1, x.shape[-1]).T),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.kernel", "model.layers.{}.mlp.{}_proj.weight", lambda x: x.T),
)  # fmt: skip


def config_of(model: nnx.Module, max_model_len: int) -> ModelConfig:
    """Return the configuration of a tunix model.

    Args:
        max_model_len: the most positions; tunix's configurations have none.

    Raises:
        ValueError: it is not one of tunix's dense Llama, Qwen2 and Qwen3 models.
    """
    name, given = type(model).__name__, getattr(model, "config", None)
    if name not in _MODELS or not type(model).__module__.startswith("tunix."):
        raise ValueError(
            f"rollout_actor must be one of tunix's models {', '.join(_MODELS)}, got {type(model).__module__}.{name}"
        )
    if getattr(given, "num_experts", None):
        raise ValueError(f"rollout_actor has {getattr(given, 'num_experts', 0)} experts: only dense models are served")
    architecture, switches = _MODELS[name]
    of: Any = given
    ties = of.weight_tying if name == "Llama3" else of.use_tied_embedding
    return ModelConfig(
        architecture, vocab_size=of.vocab_size, hidden_size=of.embed_dim, intermediate_size=of.hidden_dim,
        num_layers=of.num_layers, num_heads=of.num_heads, num_kv_heads=of.num_kv_heads, head_dim=of.head_dim,
        max_position_embeddings=max_model_len, rms_norm_eps=of.norm_eps, tie_word_embeddings=ties,
        # tunix rotates by theta alone, also models whose checkpoints scale their frequencies.
        rope=RopeConfig(
            theta=_theta_of(model), max_position_embeddings=max_model_len,
            original_max_position_embeddings=max_model_len,
        ),
        **switches,
    )  # fmt: skip


def _theta_of(model: nnx.Module) -> float:
    """Return the base of the rotation that a tunix model computes with.

    The layers of Llama and Qwen3 leave it to the default of the function that rotates, whatever their configuration
    says.
    """
    given: Any = model
    if type(model).__name__ == "Qwen2":
        return float(given.config.rope_theta)
    rotate = importlib.import_module(type(model).__module__).apply_rope
    return float(inspect.signature(rotate).parameters["rope_theta"].default)


def dtype_of(model: nnx.Module, params: Any) -> jnp.dtype:
    """Return the dtype that a tunix model computes in: its configuration's, or that of its parameters."""
    given = getattr(getattr(model, "config", None), "dtype", None)
    return jnp.dtype(next(iter(leaves_of_tree(params).values())).dtype if given is None else given)


def named_tensors(params: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield the parameters of a tunix model by their Hugging Face names.

    Args:
        params: the model's nnx state.

    Raises:
        ValueError: a parameter is unknown.
    """
    for path, array in leaves_of_tree(params).items():
        for pattern, name, transform in _NAMES:
            found = re.fullmatch(pattern, path)
            if found is not None:
                yield name.format(*found.groups()), transform(array)
                break
        else:
            raise ValueError(f"parameter {path} is none of tunix's {', '.join(_MODELS)}")


def check_no_lora(params: Any) -> None:
    """Raise ValueError if there are LoRA parameters among them."""
    lora = [path for path in leaves_of_tree(params) if "lora" in path]
    if lora:
        raise ValueError(f"the model has LoRA parameters ({lora[0]} and others), which JaxinferRollout does not merge")

"""A dense decoder written out in NumPy, with Hugging Face's names: logits and EAGLE-3 features of whole sequences.

Nothing is shared with the engine: no cache, no batch, float64 arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

DEFAULT_ROPE_THETA = 10000.0


class Checkpoint(NamedTuple):
    """A model as Hugging Face stores it: the contents of `config.json`, and tensors by name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]


class Forward(NamedTuple):
    """What a decoder computes of T tokens."""

    logits: np.ndarray  # [T, vocab]
    features: np.ndarray  # [T, F * hidden], the inputs of F layers side by side, not normed


def capture_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads, ascending.

    Raises:
        ValueError: with so few layers two of them are the same, which no EAGLE-3 head is made for.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise ValueError(f"{num_layers} layers are too few for three captured ones: {layers}")
    return layers


def forward(target: Checkpoint, tokens: Sequence[int], capture: Sequence[int] | None = None) -> Forward:
    """Logits and features of T tokens at positions 0 to T - 1.

    Args:
        target: a Llama, or a Qwen3 or SDAR (told by its norms of queries and keys), without biases.
        capture: numbers of the layers, ascending, whose inputs are the features; by default `capture_layers`.
    """
    config, tensors = target
    assert not any(name.endswith(".bias") for name in tensors), "this decoder knows no biases"
    num_layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    captured = tuple(capture_layers(num_layers) if capture is None else capture)
    assert list(captured) == sorted(set(captured) & set(range(num_layers))), f"{captured} of {num_layers} layers"

    positions = np.arange(len(tokens))
    block = positions // config.get("block_size", 1)  # of a block-diffusion model: tokens that see each other
    visible = block[:, None] >= block[None, :]
    x = tensors["model.embed_tokens.weight"][np.asarray(tokens)].astype(np.float64)
    features = []
    for number in range(num_layers):
        if number in captured:
            features.append(x)
        layer = f"model.layers.{number}."
        normed = rms_norm(x, tensors[layer + "input_layernorm.weight"], eps)
        q, k, v = project(config, tensors, layer + "self_attn.", normed, positions)
        x = x + linear(tensors, layer + "self_attn.o_proj", attend(q, k, v, visible))
        normed = rms_norm(x, tensors[layer + "post_attention_layernorm.weight"], eps)
        x = x + gated_mlp(tensors, layer + "mlp.", normed)
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    logits = linear(tensors, head, rms_norm(x, tensors["model.norm.weight"], eps))
    return Forward(logits, np.concatenate(features, axis=-1) if features else np.empty((len(tokens), 0)))


def linear(tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """[..., out] of x [..., in] by the weight [out, in] of that name."""
    return x @ tensors[name + ".weight"].T


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    """Like x [..., n], with a root mean square of 1 over the last axis, times scale [n]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies of a configuration that does not scale them."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    assert given.get("rope_type", given.get("type", "default")) == "default", f"{given} is not known here"
    return given.get("rope_theta") or config.get("rope_theta") or DEFAULT_ROPE_THETA


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """x [T, heads, d] turned by positions [T]: element i and element i + d/2 are a pair."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def project(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [T, heads, d], keys and values [T, kv_heads, d] of x [T, in], rotated to positions [T]."""
    q, k, v = (linear(tensors, f"{name}{part}_proj", x) for part in "qkv")
    q = q.reshape(len(x), config["num_attention_heads"], -1)
    k, v = (part.reshape(len(x), config["num_key_value_heads"], -1) for part in (k, v))
    if name + "q_norm.weight" in tensors:
        q = rms_norm(q, tensors[name + "q_norm.weight"], config["rms_norm_eps"])
        k = rms_norm(k, tensors[name + "k_norm.weight"], config["rms_norm_eps"])
    theta = rope_theta(config)
    return rotate(q, positions, theta), rotate(k, positions, theta), v


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """[T, heads * d] of queries [T, heads, d] over keys and values [S, kv_heads, d], where visible [T, S] says so."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(log_softmax(np.where(visible, scores, -np.inf)))
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def gated_mlp(tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """[T, hidden] of x [T, hidden]: SwiGLU."""
    gate = linear(tensors, name + "gate_proj", x)
    return linear(tensors, name + "down_proj", gate / (1 + np.exp(-gate)) * linear(tensors, name + "up_proj", x))


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Like x [..., n], normalised over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def random_target(
    rng: np.random.Generator,
    *,
    qk_norm: bool = False,
    num_layers: int = 8,
    vocab_size: int = 101,
    hidden_size: int = 48,
    rope_theta: float = 500.0,
    tie_word_embeddings: bool = False,
) -> Checkpoint:
    """A Llama, or with `qk_norm` a Qwen3, all of whose weights matter: wide kernels, norm scales that are not 1.

    By default with as many layers as it takes for the captured ones and those after them to differ.
    """
    heads, kv_heads, head_dim, inner = 4, 2, 12, 80
    config = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tie_word_embeddings,
        "eos_token_id": None,
    }
    tensors = {"model.embed_tokens.weight": random_kernel(rng, vocab_size, hidden_size, scale=1)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= random_layer(rng, prefix, config, inputs=hidden_size)
        tensors[prefix + "input_layernorm.weight"] = random_scale(rng, hidden_size)
        if qk_norm:
            tensors[prefix + "self_attn.q_norm.weight"] = random_scale(rng, head_dim)
            tensors[prefix + "self_attn.k_norm.weight"] = random_scale(rng, head_dim)
    tensors["model.norm.weight"] = random_scale(rng, hidden_size)
    if not tie_word_embeddings:
        tensors["lm_head.weight"] = random_kernel(rng, vocab_size, hidden_size)
    return Checkpoint(config, tensors)


def random_layer(
    rng: np.random.Generator, prefix: str, config: Mapping[str, Any], *, inputs: int
) -> dict[str, np.ndarray]:
    """What layers of the target and of the head have in common; the attention projects from so many `inputs`."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        prefix + "self_attn.q_proj.weight": random_kernel(rng, q_size, inputs),
        prefix + "self_attn.k_proj.weight": random_kernel(rng, kv_size, inputs),
        prefix + "self_attn.v_proj.weight": random_kernel(rng, kv_size, inputs),
        prefix + "self_attn.o_proj.weight": random_kernel(rng, hidden, q_size),
        prefix + "post_attention_layernorm.weight": random_scale(rng, hidden),
        prefix + "mlp.gate_proj.weight": random_kernel(rng, inner, hidden),
        prefix + "mlp.up_proj.weight": random_kernel(rng, inner, hidden),
        prefix + "mlp.down_proj.weight": random_kernel(rng, hidden, inner),
    }


def random_kernel(rng: np.random.Generator, outputs: int, inputs: int, *, scale: float = 1.5) -> np.ndarray:
    """float32 [outputs, inputs] that multiplies the size of what it maps by about `scale`."""
    return (scale * inputs**-0.5 * rng.standard_normal((outputs, inputs))).astype(np.float32)


def random_scale(rng: np.random.Generator, size: int) -> np.ndarray:
    """float32 [size], around 1."""
    return np.exp(0.4 * rng.standard_normal(size)).astype(np.float32)

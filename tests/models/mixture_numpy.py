"""Mixtures of experts, and LLaDA, written out in NumPy from their specification, with the names in their checkpoints:
logits of whole sequences, in float64. Nothing is shared with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.speculative.decoder_numpy import Checkpoint, attend, gated_mlp, linear, rms_norm, rope_theta, rotate

# What a configuration of Ling or LLaDA2 means where it does not say so.
LING = {"num_shared_experts": 0, "n_group": 0, "first_k_dense_replace": 0, "score_function": "softmax"}
# What LLaDA calls what Llama calls otherwise. Of tensors the longer names come first.
LLADA_FIELDS = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers", "weight_tying": "tie_word_embeddings",
}  # fmt: skip
LLADA_TENSORS = {
    "model.transformer.wte": "model.embed_tokens", "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head", "model.transformer.blocks": "model.layers", "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj", "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}  # fmt: skip


def logits_of(checkpoint: Checkpoint, tokens: Sequence[int]) -> np.ndarray:
    """[T, vocab] of T tokens at positions 0 to T - 1, of Qwen3-MoE, of Ling in both versions, of LLaDA, of LLaDA-MoE,
    or of LLaDA2.
    """
    is_llada = checkpoint.config["model_type"] == "llada"
    config, tensors = _with_names_of_llama(checkpoint) if "d_model" in checkpoint.config else checkpoint
    has_llama_names = is_llada or config["model_type"] == "qwen3_moe"
    eps = config["rms_norm_eps"]
    block = np.arange(len(tokens)) // (len(tokens) if is_llada else config.get("block_size", 1))
    visible = block[:, None] >= block[None, :]
    embeddings = "model.embed_tokens" if has_llama_names else "model.word_embeddings"
    x = tensors[embeddings + ".weight"][np.asarray(tokens)].astype(np.float64)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        normed = rms_norm(x, tensors[layer + "input_layernorm.weight"], eps)
        attention = layer + ("self_attn." if has_llama_names else "attention.")
        seen = attend(*_heads(config, tensors, attention, normed), visible)
        x = x + linear(tensors, attention + ("o_proj" if has_llama_names else "dense"), seen)
        normed = rms_norm(x, tensors[layer + "post_attention_layernorm.weight"], eps)
        has_experts = layer + "mlp.gate.weight" in tensors
        assert has_experts == _is_sparse(config, number), (
            f"layer {number} has other tensors than its configuration says"
        )
        experts = _llada_experts if is_llada else _qwen_experts if has_llama_names else ling_experts
        mix = experts if has_experts else _dense
        x = x + mix(config, tensors, layer + "mlp.", normed)
    x = rms_norm(x, tensors["model.norm.weight"], eps)
    if config.get("tie_word_embeddings"):
        return linear(tensors, embeddings, x)
    head = tensors["lm_head.weight"].astype(np.float64)
    if config.get("norm_head"):
        head = head / (np.sqrt((head**2).sum(axis=0, keepdims=True)) + 1e-7)
    return x @ head.T


def _with_names_of_llama(checkpoint: Checkpoint) -> Checkpoint:
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        dotted = f".{name}"
        for theirs, ours in LLADA_TENSORS.items():
            dotted = dotted.replace(f".{theirs}.", f".{ours}.")
        tensors[dotted.removeprefix(".")] = tensor
    return Checkpoint({LLADA_FIELDS.get(name, name): value for name, value in checkpoint.config.items()}, tensors)


def _is_sparse(config: Mapping[str, Any], number: int) -> bool:
    if config["model_type"] == "llada":
        return "moe_layer_freq" in config and config["moe_layer_freq"][number] == 1
    if config["model_type"] == "qwen3_moe":
        return number not in config["mlp_only_layers"] and (number + 1) % config["decoder_sparse_step"] == 0
    return number >= config["first_k_dense_replace"]


def _heads(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values [T, heads, d], the first two normed, if they are, and rotated."""
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    if name + "query_key_value.weight" in tensors:
        fused = linear(tensors, name + "query_key_value", x).reshape(len(x), heads + 2 * kv_heads, -1)
        q, k, v = np.split(fused, [heads, heads + kv_heads], axis=1)
    else:
        q, k, v = (linear(tensors, f"{name}{part}_proj", x) for part in "qkv")
        q, k, v = q.reshape(len(x), heads, -1), k.reshape(len(x), kv_heads, -1), v.reshape(len(x), kv_heads, -1)
    for of_q, of_k in (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm")):
        if name + of_q + ".weight" in tensors:
            q = rms_norm(q, tensors[name + of_q + ".weight"], config["rms_norm_eps"])
            k = rms_norm(k, tensors[name + of_k + ".weight"], config["rms_norm_eps"])
    size = q.shape[-1]
    turned = int(size * config["partial_rotary_factor"]) if "partial_rotary_factor" in config else size
    positions = np.arange(len(x))
    q, k = (
        np.concatenate([rotate(part[..., :turned], positions, rope_theta(config)), part[..., turned:]], axis=-1)
        for part in (q, k)
    )
    return q, k, v


def _dense(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return gated_mlp(tensors, name, x)


def _qwen_experts(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    scores = _softmax(linear(tensors, name + "gate", x))
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : config["num_experts_per_tok"]]
    return _weighed(tensors, name, x, chosen, scores, config["norm_topk_prob"], 1.0)


def _llada_experts(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray
) -> np.ndarray:
    found = _qwen_experts({"norm_topk_prob": False, **config}, tensors, name, x)
    shared = name.removesuffix("mlp.") + "shared_expert."
    return found if config.get("shared_expert_intermediate_size") is None else found + gated_mlp(tensors, shared, x)


def ling_experts(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    config = LING | dict(config)
    logits = linear(tensors, name + "gate", x)
    scores = _softmax(logits) if config["score_function"] == "softmax" else 1 / (1 + np.exp(-logits))
    ranked = scores + tensors.get(name + "gate.expert_bias", 0.0)
    if config["n_group"] > 1:
        groups = ranked.reshape(len(x), config["n_group"], -1)
        best = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        left_out = np.argsort(best, axis=1)[:, : config["n_group"] - config["topk_group"]]
        for token, some in enumerate(left_out):
            groups[token, some] = -np.inf
    chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : config["num_experts_per_tok"]]
    scaling = config.get("routed_scaling_factor", 1.0)
    found = _weighed(tensors, name, x, chosen, scores, config["norm_topk_prob"], scaling)
    return found + gated_mlp(tensors, name + "shared_experts.", x) if config["num_shared_experts"] else found


def _weighed(
    tensors: Mapping[str, np.ndarray],
    name: str,
    x: np.ndarray,
    chosen: np.ndarray,
    scores: np.ndarray,
    normalizes: bool,
    scaling: float,
) -> np.ndarray:
    """The chosen experts [T, k] of each token, by their scores [T, E]."""
    total = np.zeros(x.shape)
    for token, experts in enumerate(chosen):
        weights = scores[token, experts]
        if normalizes:
            weights = weights / weights.sum()
        for expert, weight in zip(experts, weights * scaling, strict=True):
            total[token] += weight * gated_mlp(tensors, f"{name}experts.{expert}.", x[token])
    return total


def _softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)

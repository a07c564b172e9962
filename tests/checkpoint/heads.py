"""Small published EAGLE-3 heads for tests: a configuration and random tensors under the names that publishers use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxinfer.models.config import ModelConfig
from tests.checkpoint.builders import tiny_config

TARGET = tiny_config("Qwen3ForCausalLM", num_layers=8, hidden_size=22)
"""Of a head as `head_config` describes it."""
HEADS, KV_HEADS, DIM, INNER, WORDS = 4, 2, 6, 34, 16


def head_config(target: ModelConfig = TARGET, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a head for `target`; a change to None removes a field."""
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "draft_vocab_size": WORDS, "torch_dtype": "float32",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    } | changes  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def head_tensors(target: ModelConfig = TARGET, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Random tensors of that head; `sizes` may change `hidden`, `features` and `words`."""
    hidden = sizes.get("hidden", target.hidden_size)
    features, words = sizes.get("features", 3 * target.hidden_size), sizes.get("words", WORDS)
    shapes = {
        "fc.weight": (hidden, features),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (INNER, hidden),
        "midlayer.mlp.up_proj.weight": (INNER, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, INNER),
        "norm.weight": (hidden,),
        "lm_head.weight": (words, hidden),
    }
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    ids = np.sort(rng.choice(target.vocab_size, words, replace=False))
    tensors["d2t"] = ids - np.arange(words)
    tensors["t2d"] = np.isin(np.arange(target.vocab_size), ids)
    return tensors


def token_ids(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The target's token of each draft word."""
    return tensors["d2t"] + np.arange(len(tensors["d2t"]))


def write_head(
    directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """A head in a new directory; returns its tensors."""
    directory.mkdir(parents=True)
    tensors = head_tensors() if tensors is None else tensors
    (directory / "config.json").write_text(json.dumps(head_config() if config is None else config))
    save_file(tensors, directory / "model.safetensors")
    return tensors

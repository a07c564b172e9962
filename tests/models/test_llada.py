"""Logits of LLaDA and LLaDA-MoE, whose tokens all see each other, against those of NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint import convert_checkpoint, export_hf, load_checkpoint
from jaxinfer.models.decoder import DecoderLM
from tests.diffusion.oracle import BlockAttend
from tests.models.mixture_numpy import logits_of
from tests.models.test_llada_config import LLADA_8B, LLADA_MOE
from tests.speculative.decoder_numpy import Checkpoint, random_kernel, random_scale

HIDDEN, HEAD, WORDS, ROWS = 32, 8, 60, 64
IDS = [(23 * number + 7) % WORDS for number in range(19)]
SMALL_LLADA = LLADA_8B | {
    "d_model": HIDDEN, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 40, "vocab_size": WORDS,
    "embedding_size": ROWS, "mask_token_id": 59, "eos_token_id": 58, "rope_theta": 500.0, "max_sequence_length": 64,
}  # fmt: skip
SMALL_MOE = LLADA_MOE | {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "dense_intermediate_size": 40, "expert_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_layer_freq": [1, 1, 1], "vocab_size": WORDS, "mask_token_id": 59, "eos_token_id": 58, "rope_theta": 500.0,
    "max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = {
    "llada": SMALL_LLADA,
    "llada without groups of heads": SMALL_LLADA | {"n_kv_heads": None, "embedding_size": None},
    "llada tied": SMALL_LLADA | {"weight_tying": True},
    "moe": SMALL_MOE,
    "moe shared and dense": SMALL_MOE | {"shared_expert_intermediate_size": 20, "moe_layer_freq": [0, 1, 0]},
    "moe normalized": SMALL_MOE | {"norm_topk_prob": True},
    "moe tied, without norms of heads": SMALL_MOE | {"tie_word_embeddings": True, "qk_layernorm": False},
}


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors with the names that the publishers give them."""
    rng = np.random.default_rng(5)
    of_family = _llada_shapes if "d_model" in config else _moe_shapes
    return {
        name + ".weight": random_scale(rng, *shape) if len(shape) == 1 else random_kernel(rng, *shape)
        for name, shape in of_family(config).items()
    }


def _llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    rows, inner = config["embedding_size"] or WORDS, config["mlp_hidden_size"]
    kv = (config["n_kv_heads"] or config["n_heads"]) * HEAD
    shapes: dict[str, tuple[int, ...]] = {"wte": (rows, HIDDEN), "ln_f": (HIDDEN,)}
    if not config["weight_tying"]:
        shapes["ff_out"] = (rows, HIDDEN)
    for number in range(config["n_layers"]):
        shapes |= {f"blocks.{number}.{name}": (HIDDEN,) for name in ("attn_norm", "ff_norm")}
        shapes |= {f"blocks.{number}.{name}": (HIDDEN, HIDDEN) for name in ("q_proj", "attn_out")}
        shapes |= {f"blocks.{number}.{name}": (kv, HIDDEN) for name in ("k_proj", "v_proj")}
        shapes |= {f"blocks.{number}.{name}": (inner, HIDDEN) for name in ("ff_proj", "up_proj")}
        shapes[f"blocks.{number}.ff_out"] = (HIDDEN, inner)
    return {f"model.transformer.{name}": shape for name, shape in shapes.items()}


def _moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    def mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}gate_proj": (inner, HIDDEN), f"{name}up_proj": (inner, HIDDEN),
                f"{name}down_proj": (HIDDEN, inner)}  # fmt: skip

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (WORDS, HIDDEN), "model.norm": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (WORDS, HIDDEN)
    kv, experts = config["num_key_value_heads"] * HEAD, config["num_experts"]
    for number, is_sparse in enumerate(config["moe_layer_freq"]):
        layer = f"model.layers.{number}."
        shapes |= {layer + name: (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj": (kv, HIDDEN) for name in "kv"}
        if config["qk_layernorm"]:
            shapes |= {f"{layer}self_attn.{name}_norm": (HEAD,) for name in "qk"}
        if not is_sparse:
            shapes |= mlp(layer + "mlp.", config["dense_intermediate_size"])
            continue
        shapes[layer + "mlp.gate"] = (experts, HIDDEN)
        for expert in range(experts):
            shapes |= mlp(f"{layer}mlp.experts.{expert}.", config["expert_intermediate_size"])
        if config["shared_expert_intermediate_size"] is not None:
            shapes |= mlp(layer + "shared_expert.", config["shared_expert_intermediate_size"])
    return shapes


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def computed(model: DecoderLM, ids: list[int]) -> np.ndarray:
    """Logits [T, rows] of T tokens that all see each other."""
    everything = BlockAttend(len(ids))
    return np.asarray(model.logits(model(jnp.asarray(ids), jnp.arange(len(ids)), everything)))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_numpy_before_and_after_conversion_and_export(name, tmp_path):
    checkpoint = Checkpoint(VARIANTS[name], tensors_of(VARIANTS[name]))
    source = write(tmp_path / "published", dict(checkpoint.config), dict(checkpoint.tensors))
    expected = logits_of(checkpoint, IDS)
    assert expected.shape == (len(IDS), checkpoint.config.get("embedding_size") or WORDS)
    config, model = load_checkpoint(source, dtype="float32")
    logits = computed(model, IDS)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    convert_checkpoint(source, tmp_path / "converted", progress=False)
    np.testing.assert_array_equal(computed(load_checkpoint(tmp_path / "converted")[1], IDS), logits)
    export_hf(model, config, tmp_path / "exported")
    again, exported = load_checkpoint(tmp_path / "exported")
    assert again.experts == config.experts and again.architecture == config.architecture
    np.testing.assert_array_equal(computed(exported, IDS), logits)


@pytest.mark.parametrize("name", ["llada", "moe"])
def test_a_token_changes_the_logits_of_those_before_it(name, tmp_path):
    config = VARIANTS[name]
    _, model = load_checkpoint(write(tmp_path / name, config, tensors_of(config)), dtype="float32")
    changed = [*IDS[:-1], (IDS[-1] + 1) % WORDS]
    difference = np.abs(computed(model, changed) - computed(model, IDS)).max(axis=1)
    assert difference.min() > 1e-3


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llada", "rope_theta", 5000.0),
        ("moe", "rope_theta", 5000.0),
        ("moe", "norm_topk_prob", True),
        ("moe", "num_experts_per_tok", 4),
        ("moe shared and dense", "shared_expert_intermediate_size", None),
    ],
)
def test_every_field_changes_the_logits_of_numpy(name, field, value):
    config = VARIANTS[name]
    tensors = tensors_of(config)
    changed = logits_of(Checkpoint({**config, field: value}, tensors), IDS)
    assert np.abs(changed - logits_of(Checkpoint(config, tensors), IDS)).max() > 1e-2

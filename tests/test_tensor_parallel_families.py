"""Sinks, gates, norms over all heads, heads by layer and shared keys on four devices: the tokens of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoint.export import export_hf
from jaxinfer.models.config import ModelConfig
from tests.builders import random_model
from tests.test_tensor_parallel import finish, start

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "intermediate_size": 96, "max_position_embeddings": 256, "num_hidden_layers": 2, "sliding_window": 9,
}  # fmt: skip
CONFIGS = {
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 32,
    },
    "olmo2": {"architectures": ["Olmo3ForCausalLM"]},
    "laguna": {
        "architectures": ["LagunaForCausalLM"], "num_attention_heads_per_layer": [8, 4], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gpt_oss", "gemma4") else [pytest.mark.slow]) for name in CONFIGS]
)
def test_four_devices_give_the_tokens_of_one(name, tmp_path: Path):
    config = ModelConfig.from_hf(SIZES | CONFIGS[name])
    export_hf(random_model(config), config, tmp_path / "model")
    one, four = (finish(start(tmp_path / "model", size, devices=size)) for size in (1, 4))
    assert four["devices"] == 4
    for what in ("tokens", "branches", "bound"):
        assert four[what] == one[what]
    assert len({token for tokens in one["tokens"] for token in tokens}) > 6

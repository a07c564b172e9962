"""Exported directories hold what Hugging Face's tools expect, and come back bit for bit."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer.checkpoint import export_hf, load_checkpoint, read_config
from jaxinfer.checkpoint.export import hf_config
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.rope import RopeConfig
from tests.checkpoint.builders import (
    FAMILY_CONFIGS,
    assert_same_parameters,
    parameters_of,
    random_model,
    tiny_config,
    write_checkpoint,
)
from tests.hf_fixtures import NAMES, checkpoint_path


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_model_comes_back_bit_for_bit(tmp_path, name):
    model = write_checkpoint(tmp_path, FAMILY_CONFIGS[name])
    config, loaded = load_checkpoint(tmp_path)
    assert config == dataclasses.replace(FAMILY_CONFIGS[name], dtype="float32")
    assert_same_parameters(loaded, model)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_transformers_wrote_is_written_again_with_the_same_tensors(tmp_path, name):
    config, model = load_checkpoint(checkpoint_path(name))
    export_hf(model, config, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as ours:
        found = {}
        for file in checkpoint_path(name).glob("*.safetensors"):
            with safe_open(file, "np") as theirs:
                assert theirs.metadata() == ours.metadata() == {"format": "pt"}
                found |= {key: theirs.get_tensor(key) for key in theirs.keys()}  # noqa: SIM118
        assert set(ours.keys()) == set(found)
        for key, values in found.items():
            np.testing.assert_array_equal(ours.get_tensor(key), values)
    assert read_config(tmp_path)[1] == config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_stored_in_the_dtype_that_was_asked_for(tmp_path, dtype):
    model = write_checkpoint(tmp_path, dtype=dtype)
    config, loaded = load_checkpoint(tmp_path)
    assert config.dtype == dtype and json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    stored = parameters_of(loaded)
    for path, values in parameters_of(model).items():
        np.testing.assert_array_equal(stored[path], values.astype(jnp.dtype(dtype)))


def test_shards_stay_under_the_limit_and_the_index_knows_them(tmp_path):
    model = write_checkpoint(tmp_path, max_shard_bytes=6_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, 1 + len(files))
    ]
    assert len(files) > 5
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        with safe_open(file, "np") as shard:
            tensors = {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
        assert {key for key, name in index["weight_map"].items() if name == file.name} == tensors.keys()
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 6_000 or len(tensors) == 1
        total += size
    assert index["metadata"]["total_size"] == total
    assert_same_parameters(load_checkpoint(tmp_path)[1], model)


ROPES = [
    RopeConfig("linear", 5e5, 64, 64, factor=2.0),
    RopeConfig("dynamic", 5e5, 64, 64, factor=2.0),
    RopeConfig("llama3", 5e5, 64, 16, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeConfig("yarn", 5e5, 64, 16, factor=4.0, beta_fast=24.0, beta_slow=2.0, truncate=False),
    RopeConfig("yarn", 5e5, 64, 16, factor=4.0, attention_factor=0.8),
    RopeConfig("yarn", 5e5, 64, 16, factor=4.0, mscale=0.7, mscale_all_dim=1.1),
    RopeConfig("yarn", 5e5, 64, 16),
]


@pytest.mark.parametrize("rope", ROPES)
def test_the_configuration_is_written_so_that_it_reads_the_same(rope):
    config = tiny_config(
        "Qwen3ForCausalLM", rope=rope, rms_norm_eps=1e-3, hidden_act="gelu_new", eos_token_ids=(3, 4), bos_token_id=1
    )
    assert ModelConfig.from_hf(json.loads(json.dumps(hf_config(config)))) == config


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_family_that_rotates_half_a_head_by_default_may_rotate_all_of_it(factor):
    experts = ExpertsConfig(8, 2, 16, shared_size=16, dense_layers=(0,), score="sigmoid", has_bias=True)
    config = tiny_config(
        "LLaDA2MoeModelLM", head_dim=8, qk_norm=True, block_size=8, mask_token_id=1, experts=experts,
        rope=RopeConfig("default", 5e5, 64, 64, partial_rotary_factor=factor),
    )  # fmt: skip
    assert ModelConfig.from_hf(json.loads(json.dumps(hf_config(config)))) == config


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {"qkv_bias": True}),
        ("LlamaForCausalLM", {"qk_norm": True}),
        ("Qwen2ForCausalLM", {"o_bias": True}),
        ("Qwen2ForCausalLM", {"mlp_bias": True}),
        ("Qwen3ForCausalLM", {"mlp_bias": True}),
    ],
)
def test_a_model_that_the_format_cannot_express_is_refused_by_field(tmp_path, architecture, fields):
    config = tiny_config(architecture, **fields)
    with pytest.raises(ValueError, match=f"cannot express ({'|'.join([*fields, 'o_bias'])})="):
        export_hf(random_model(config), config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_existing_weights_are_not_overwritten(tmp_path):
    write_checkpoint(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"model.safetensors exists"):
        write_checkpoint(tmp_path, tiny_config(hidden_size=24))
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", [None, "auto", "int8"])
def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match="dtype"):
        write_checkpoint(tmp_path, dtype=dtype)

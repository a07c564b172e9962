"""Exported directories hold what Hugging Face's tools expect, and come back bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer.checkpoint import export_hf, load_checkpoint, read_config
from jaxinfer.checkpoint.export import hf_config
from jaxinfer.checkpoint.layout import layout_of
from jaxinfer.checkpoint.weight_map import matching, placements
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.families import FAMILIES
from jaxinfer.models.layer_config import LayerConfig
from jaxinfer.models.rope import RopeConfig
from tests.checkpoint.builders import (
    EVERY_FIXTURE,
    FAMILY_CONFIGS,
    assert_same_parameters,
    parameters_of,
    random_model,
    tiny_config,
    write_checkpoint,
)
from tests.checkpoint.test_published_configs import PUBLISHED
from tests.hf_fixtures import NAMES, checkpoint_path


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_model_comes_back_bit_for_bit(tmp_path, name):
    model = write_checkpoint(tmp_path, FAMILY_CONFIGS[name])
    config, loaded = load_checkpoint(tmp_path)
    assert config == dataclasses.replace(FAMILY_CONFIGS[name], dtype="float32")
    assert_same_parameters(loaded, model)


def tensors_in(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a directory by the names in its files."""
    found: dict[str, np.ndarray] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "np") as stored:
            assert stored.metadata() == {"format": "pt"}
            found |= {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", EVERY_FIXTURE)
def test_a_checkpoint_that_transformers_wrote_is_written_again_with_the_same_tensors(tmp_path, name):
    config, model = load_checkpoint(checkpoint_path(name))
    export_hf(model, config, tmp_path)
    layout, ours, theirs = layout_of(config), tensors_in(tmp_path), tensors_in(checkpoint_path(name))
    for left_out in matching(theirs, layout.left_out):
        del theirs[left_out]
    # Text models are written without their wrappers, except where transformers has no class for that.
    if name not in ("gemma3_wrapped", "gemma4", "gemma4_e2b", "gemma4_unified", "gpt_oss_mxfp4"):
        assert ours.keys() == theirs.keys()
    found = {layout.mapped(key): values for key, values in ours.items()}
    wanted = {layout.mapped(key): values for key, values in theirs.items()}
    if name == "gpt_oss_mxfp4":  # experts are written as they were read
        wanted = {key: values for key, values in wanted.items() if "_proj_" not in key}
        found = {key: values for key, values in found.items() if not key.endswith("_proj") and "_proj_" not in key}
    assert found.keys() == wanted.keys()
    plus_1 = {placement.source for placement in placements(config) if placement.added}
    for key, values in wanted.items():  # 1 was added to some norms, and rounded
        np.testing.assert_array_equal(found[key], values + np.float32(1) - np.float32(1) if key in plus_1 else values)
    back, loaded = load_checkpoint(tmp_path)
    assert back == dataclasses.replace(config, num_nextn_layers=0)
    assert_same_parameters(loaded, model)


# Fields of transformers' configurations that are written otherwise with the same meaning, or change nothing.
OTHERWISE = frozenset({
    "architectures", "transformers_version", "initializer_range", "pad_token_id", "dtype", "use_cache",
    "attention_dropout", "router_aux_loss_coef", "max_window_layers", "sliding_window_pattern",
    "_sliding_window_pattern", "decoder_sparse_step", "mlp_only_layers", "gating", "use_bidirectional_attention",
    "quantization_config", "num_nextn_predict_layers", "eos_token_id", "_name_or_path",
})  # fmt: skip
PUBLISHED_HERE = [
    path for path in sorted(PUBLISHED.iterdir())
    if not FAMILIES[read_config(path)[1].architecture].has_remote_code
]  # fmt: skip


def as_transformers_reads(directory: Path) -> dict[str, Any]:
    """Fields of the text model's configuration; rotary ones without repetitions."""
    from transformers import AutoConfig

    values = AutoConfig.from_pretrained(directory).get_text_config(decoder=True).to_dict()
    given = values["rope_parameters"]
    for parameters in (given, *(each for each in given.values() if isinstance(each, dict))):
        parameters.pop("type", None)
        if parameters.get("partial_rotary_factor") == 1.0:
            del parameters["partial_rotary_factor"]
        if alpha := parameters.get("alpha"):
            theta = parameters["rope_theta"] * alpha ** (values["head_dim"] / (values["head_dim"] - 2))
            given = {"rope_type": "default", "rope_theta": theta}
    return values | {"rope_parameters": given}


@pytest.mark.parametrize("path", [*map(checkpoint_path, NAMES), *PUBLISHED_HERE], ids=lambda path: path.name)
def test_transformers_reads_what_is_written_as_what_was_published(tmp_path, path):
    config = read_config(path)[1]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    before, after = as_transformers_reads(path), as_transformers_reads(tmp_path)
    assert before["model_type"] == after["model_type"]
    for name in ("layer_types", "rope_parameters", "sliding_window", "per_layer_config"):
        assert before.get(name) == after.get(name), name
    ignored = OTHERWISE if config.per_layer_size else OTHERWISE | {"vocab_size_per_layer_input"}
    different = {name: (before[name], after[name]) for name in before.keys() & after.keys() - ignored}
    different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
    assert different in ({}, {"head_dim": (None, config.head_dim)})


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


def layers_with(*windows: int | None) -> tuple[LayerConfig, ...]:
    """Layers of a small configuration with these windows."""
    return tuple(dataclasses.replace(tiny_config().common_layer, window=window) for window in windows)


ROPES = [
    RopeConfig("longrope", 5e5, 64, 16, short_factor=(1.0,) * 5, long_factor=(2.0,) * 5),
    RopeConfig("longrope", 5e5, 64, 16, short_factor=(1.0,) * 5, long_factor=(2.0,) * 5, factor=3.0),
    RopeConfig("longrope", 5e5, 64, 16, short_factor=(1.0,) * 5, long_factor=(2.0,) * 5, attention_factor=0.8),
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
    architecture = "Phi3ForCausalLM" if rope.rope_type == "longrope" else "Qwen3ForCausalLM"
    config = tiny_config(
        architecture, rope=rope, rms_norm_eps=1e-3, hidden_act="gelu_new", eos_token_ids=(3, 4), bos_token_id=1
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
        ("MistralForCausalLM", {"layers": layers_with(8, 9)}),
        ("MixtralForCausalLM", {"layers": layers_with(8, None), "experts": ExpertsConfig(4, 2, 26)}),
        ("LlamaForCausalLM", {"layers": layers_with(8, 8)}),
        ("GraniteForCausalLM", {"score_cap": 30.0, "attention_scale": 1.0}),
    ],
)
def test_a_model_that_the_format_cannot_express_is_refused_by_field(tmp_path, architecture, fields):
    config = tiny_config(architecture, **fields)
    with pytest.raises(ValueError, match=f"cannot express ({'|'.join([*fields, 'o_bias'])})="):
        hf_config(config)
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

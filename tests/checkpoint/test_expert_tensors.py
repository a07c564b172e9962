"""Tensors of mixtures of experts: their several names, fused projections, heads rotated in part, normed heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import CheckpointError, convert_checkpoint, load_checkpoint
from jaxinfer.checkpoint.weight_map import placements
from tests.checkpoint.builders import (
    FAMILY_CONFIGS,
    PARTIAL_ROPE,
    assert_same_parameters,
    parameters_of,
    tiny_config,
    write_checkpoint,
)

CONFIG = FAMILY_CONFIGS["ling_2"]
LAYER, WEIGHTS = "model.layers.1.mlp.", "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    write_checkpoint(tmp_path / "hf", CONFIG)
    return tmp_path / "hf"


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / WEIGHTS)


def edit_config(directory: Path, **fields) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def of_experts(tensors: dict[str, np.ndarray], part: str) -> np.ndarray:
    """[experts, ...] of the tensors of single experts, which go."""
    count = sum(name.startswith(f"{LAYER}experts.") and name.endswith(f".{part}_proj.weight") for name in tensors)
    return np.stack([tensors.pop(f"{LAYER}experts.{number}.{part}_proj.weight") for number in range(count)])


def stack(tensors: dict[str, np.ndarray]) -> None:
    for part in ("gate", "up", "down"):
        tensors[f"{LAYER}experts.{part}_proj"] = of_experts(tensors, part)


def fuse(tensors: dict[str, np.ndarray], names: tuple[str, str]) -> None:
    tensors[LAYER + names[0]] = np.concatenate([of_experts(tensors, "gate"), of_experts(tensors, "up")], axis=1)
    tensors[LAYER + names[1]] = of_experts(tensors, "down")


@pytest.mark.parametrize(
    "change",
    [
        stack,
        lambda tensors: fuse(tensors, ("experts.gate_up_proj", "experts.down_proj")),
        lambda tensors: fuse(tensors, ("w1", "w2")),
    ],
    ids=["stacked", "gate and up in one", "w1 and w2"],
)
@pytest.mark.parametrize("family", ["ling_2", "llada_moe"])
def test_experts_that_are_stored_together_are_the_same(family, tmp_path, change):
    checkpoint = tmp_path / "hf"
    write_checkpoint(checkpoint, FAMILY_CONFIGS[family])
    _, apart = load_checkpoint(checkpoint)
    rewrite(checkpoint, change)
    _, together = load_checkpoint(checkpoint)
    assert_same_parameters(together, apart)
    convert_checkpoint(checkpoint, tmp_path / "converted", progress=False)
    assert_same_parameters(load_checkpoint(tmp_path / "converted")[1], apart)


def test_an_expert_that_is_missing_is_named(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.pop(f"{LAYER}experts.3.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.mlp.experts.3.up_proj.weight"):
        load_checkpoint(checkpoint)


def test_a_fused_projection_has_all_queries_then_keys_then_values(checkpoint):
    fused = load_file(checkpoint / WEIGHTS)["model.layers.0.attention.query_key_value.weight"]
    kernel = parameters_of(load_checkpoint(checkpoint)[1])["layers.0.attention.qkv.kernel"]
    group, kv, dim = CONFIG.group_size, CONFIG.num_kv_heads, CONFIG.head_dim
    heads = fused.reshape(kv * (group + 2), dim, -1)
    for head in range(kv):
        np.testing.assert_array_equal(kernel[head, group + 1], heads[kv * (group + 1) + head])
        # Keys' dimensions are in another order, the same in which those of queries are.
        np.testing.assert_array_equal(np.sort(kernel[head, group], axis=0), np.sort(heads[kv * group + head], axis=0))
        np.testing.assert_array_equal(kernel[head, group, 0], heads[kv * group + head, 0])


def test_a_head_that_is_rotated_in_part_has_its_pairs_half_a_head_apart():
    """The first 4 of 10 dimensions are rotated: the pairs 0 and 2, 1 and 3."""
    assert CONFIG.rotary_dim == 4 and PARTIAL_ROPE.rotary_dim(10) == 4
    for name, is_ordered in (
        ("query_key_value.weight", True),
        ("query_layernorm.weight", True),
        ("dense.weight", False),
    ):
        placement = next(p for p in placements(CONFIG) if p.source == f"model.layers.0.attention.{name}")
        assert (placement.head is not None) == is_ordered
    norm = next(p for p in placements(CONFIG) if p.source.endswith("layers.0.attention.key_layernorm.weight"))
    found = np.zeros(10)
    norm.store(np.arange(10.0), found)
    assert found.tolist() == [0, 1, 4, 5, 6, 2, 3, 7, 8, 9]


def test_layers_that_draft_further_tokens_are_left_out_with_a_line(checkpoint, caplog):
    _, before = load_checkpoint(checkpoint)
    rewrite(
        checkpoint, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": np.ones((22, 44), np.float32)})
    )
    with pytest.raises(CheckpointError, match=r"left over: model.layers.2.eh_proj.weight"):
        load_checkpoint(checkpoint)
    edit_config(checkpoint, num_nextn_predict_layers=1)
    _, after = load_checkpoint(checkpoint)
    assert_same_parameters(after, before)
    assert "1 tensors of parts that are not computed are left out: model.layers.2.eh_proj.weight" in caplog.text


def test_an_output_head_is_normed_where_the_configuration_says_so(tmp_path):
    config = tiny_config("BailingMoeForCausalLM", experts=FAMILY_CONFIGS["ling"].experts)
    write_checkpoint(tmp_path, config)
    plain = parameters_of(load_checkpoint(tmp_path)[1])["lm_head.kernel"]
    edit_config(tmp_path, norm_head=True)
    normed = parameters_of(load_checkpoint(tmp_path)[1])["lm_head.kernel"]
    np.testing.assert_allclose(normed, plain / np.linalg.norm(plain, axis=0), rtol=1e-5)
    assert np.abs(normed - plain).max() > 0.1

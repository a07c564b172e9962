"""The weight map of every family: it covers the module and the checkpoint, under the names of wrappers too."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.checkpoint import CheckpointError, read_config
from jaxinfer.checkpoint.weight_map import match_sources, parameters
from jaxinfer.models.config import ModelConfig
from tests.checkpoint.test_weight_map import (  # noqa: F401
    placed,
    sources,
    test_a_checkpoint_with_exactly_the_mapped_tensors_matches,
    test_every_element_of_a_source_is_taken_once,
    test_sources_cover_every_element_of_every_parameter_once,
    test_storing_and_taking_out_again_gives_the_same_tensor,
    test_the_parameters_of_the_map_are_those_of_the_module,
)
from tests.hf_fixtures import NAMES, checkpoint_path


def config_of(name: str) -> ModelConfig:
    return read_config(checkpoint_path(name))[1]


# Of configurations that have the same tensors, one is enough.
@pytest.fixture(params=sorted({tuple(sources(config_of(name)).items()): name for name in NAMES}.values()))
def config(request):
    return config_of(request.param)


GATE, UP = slice(0, 1), slice(1, 2)


@pytest.mark.parametrize(
    ("name", "source", "part"),
    [
        ("mixtral", "block_sparse_moe.experts.2.w1.weight", (slice(2, 3), slice(None), GATE, slice(None))),
        ("mixtral", "block_sparse_moe.experts.2.w3.weight", (slice(2, 3), slice(None), UP, slice(None))),
        ("minimax_m2", "block_sparse_moe.experts.0.w1.weight", (slice(0, 1), slice(None), GATE, slice(None))),
        ("glm4_moe", "mlp.experts.5.up_proj.weight", (slice(5, 6), slice(None), UP, slice(None))),
        ("qwen2_moe", "mlp.shared_expert.gate_proj.weight", (slice(None), GATE, slice(None))),
    ],
)
def test_gates_and_factors_are_those_of_their_names(name, source, part):
    assert placed(config_of(name), f"model.layers.1.{source}").part == part


def test_a_fused_mlp_has_all_gates_before_all_factors():
    for name in ("phi3", "glm4"):
        config = config_of(name)
        placement = placed(config, "model.layers.0.mlp.gate_up_proj.weight")
        rows = np.arange(2 * config.intermediate_size)
        kernel = np.zeros(placement.target.shape)
        placement.store(rows[:, None] + np.zeros(placement.source_shape), kernel)
        assert (kernel[:, 0, 0] == rows[: config.intermediate_size]).all()
        assert (kernel[:, 1, 0] == rows[config.intermediate_size :]).all()


def test_experts_of_gpt_oss_are_stored_with_inputs_first_gates_and_factors_by_turns():
    config = config_of("gpt_oss")
    placement = placed(config, "model.layers.0.mlp.experts.gate_up_proj")
    experts, hidden, columns = placement.source_shape
    assert (hidden, columns) == (config.hidden_size, 2 * config.intermediate_size)
    source = np.arange(experts * hidden * columns).reshape(placement.source_shape)
    kernel = np.zeros(placement.target.shape, int)
    placement.store(source, kernel)
    np.testing.assert_array_equal(kernel[:, :, 0], source[:, :, ::2].swapaxes(1, 2))
    np.testing.assert_array_equal(kernel[:, :, 1], source[:, :, 1::2].swapaxes(1, 2))


def test_heads_whose_neighbours_are_pairs_are_stored_in_halves():
    """ERNIE rotates all 16 dimensions, GLM-4 the first 8."""
    found = {}
    for name in ("ernie4_5", "glm4"):
        placement = placed(config_of(name), "model.layers.0.self_attn.k_proj.bias")
        bias = np.full(placement.target.shape, -1)
        placement.store(np.tile(np.arange(16), 2), bias)
        found[name] = bias[0, -2].tolist()
    assert found["ernie4_5"] == [*range(0, 16, 2), *range(1, 16, 2)]
    assert found["glm4"] == [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("name", "added"),
    [("gemma2", {"layers", "final"}), ("muse_glimmer", {"layers"}), ("gemma4", set()), ("olmo3", set())],
)
def test_norms_that_are_stored_minus_1_are_those_of_their_families(name, added):
    config = config_of(name)
    before = placed(config, next(source for source in sources(config) if "layers.0" in source and "norm" in source))
    final = placed(config, "model.norm.weight")
    assert {where for where, each in (("layers", before), ("final", final)) if each.added == 1.0} == added
    assert before.target.dtype == final.target.dtype == np.float32


def test_layers_of_laguna_have_as_many_heads_as_they_say():
    shapes = {parameter.path: parameter.shape for parameter in parameters(config_of("laguna"))}
    assert [shapes[f"layers.{number}.attention.qkv.kernel"][:2] for number in range(3)] == [(2, 4), (2, 5), (2, 5)]
    assert [shapes[f"layers.{number}.attention.gate.kernel"][:2] for number in range(3)] == [(2, 2), (2, 3), (2, 3)]


def test_layers_that_read_earlier_keys_have_none_and_those_of_the_checkpoint_are_left_out():
    config = config_of("gemma4_e2b")
    own = sources(config)
    keys = [number for number in range(6) if f"model.layers.{number}.self_attn.k_proj.weight" in own]
    assert keys == [0, 1, 2] and "model.layers.5.self_attn.q_proj.weight" in own
    unused = {f"model.layers.{number}.self_attn.{x}.weight": (1, 1) for number in (3, 5) for x in ("k_proj", "v_proj")}
    unused["model.layers.4.self_attn.k_norm.weight"] = (8,)
    assert match_sources(own | unused, config) == {name: name for name in own}
    with pytest.raises(CheckpointError, match="left over: model.layers.4.self_attn.x_norm.weight"):
        match_sources(own | {"model.layers.4.self_attn.x_norm.weight": (8,)}, config)


def test_values_that_are_keys_have_no_tensor():
    own = sources(config_of("gemma4"))
    assert [f"model.layers.{number}.self_attn.v_proj.weight" in own for number in range(4)] == [True, False] * 2


# Beginnings of a wrapper's tensors, before and since version 5 of transformers: of the layers, and of the output head.
PREFIXES = [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_unified", "ministral3", "mistral_window", "muse_glimmer"])
@pytest.mark.parametrize(("inside", "head"), PREFIXES)
def test_tensors_of_a_wrapper_are_those_of_its_text_model(name, inside, head):
    config = config_of(name)
    renamed = {
        source: inside + source.removeprefix("model.") if source.startswith("model.") else
        head + source.removeprefix("lm_head.")
        for source in sources(config)
    }  # fmt: skip
    shapes = {renamed[source]: shape for source, shape in sources(config).items()}
    towers = {"vision_tower.blocks.0.q_proj.weight": (4, 4), "model.multi_modal_projector.linear_1.weight": (4, 4),
              "model.audio_tower.layers.0.norm.weight": (4,)}  # fmt: skip
    assert match_sources(shapes | towers, config) == renamed
    with pytest.raises(CheckpointError, match="left over: model.other.weight"):
        match_sources(shapes | {"model.other.weight": (4,)}, config)
    del shapes[renamed["model.norm.weight"]]
    with pytest.raises(CheckpointError, match="missing: model.norm.weight"):
        match_sources(shapes, config)


def test_towers_are_left_over_where_no_wrapper_exists():
    config = config_of("gemma2")
    with pytest.raises(CheckpointError, match="left over: vision_tower.norm.weight"):
        match_sources(sources(config) | {"vision_tower.norm.weight": (4,)}, config)

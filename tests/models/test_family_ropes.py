"""Layers of each family are rotated as the family's rule says: by type of layers, not at all, by other names."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import RopeConfig
from tests.models.layer_patterns import FULL, SLIDING, read, refusal, types

LENGTH = 1024  # max_position_embeddings


def rope(rope_type: str = "default", theta: float = 1e4, original: int = LENGTH, **fields: Any) -> RopeConfig:
    return RopeConfig(rope_type, theta, LENGTH, original, **fields)


def ropes(model_type: str, **fields: Any) -> tuple[RopeConfig | None, RopeConfig | None]:
    """The rotation of a full layer and that of a layer with a window, of a model of six layers."""
    config = read(model_type, **({"num_hidden_layers": 6, "max_position_embeddings": LENGTH} | fields))
    full = {layer.rope for layer in config.all_layers if layer.window is None}
    sliding = {layer.rope for layer in config.all_layers if layer.window is not None}
    assert len(full) == len(sliding) == 1 and config.rope == (*full, *sliding)[full == {None}]
    return full.pop(), sliding.pop()


def only_rope(model_type: str, **fields: Any) -> RopeConfig:
    """The rotation of a model whose layers are all rotated alike."""
    config = read(model_type, **({"max_position_embeddings": LENGTH} | fields))
    assert {layer.rope for layer in config.all_layers} == {config.rope}
    return config.rope


def rotated(config: ModelConfig) -> str:
    """Which layers are rotated, such as "RR-R"."""
    return "".join("-" if layer.rope is None else "R" for layer in config.all_layers)


LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "attention_factor": 1.25}
YARN_ROPE: dict[str, Any] = {"original": 128, "factor": 8.0, "attention_factor": 1.25}


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, rope(theta=1e6), rope()),
        ({"rope_theta": 5e5, "rope_local_base_freq": 7.0}, rope(theta=5e5), rope(theta=7.0)),
        # An older rope_scaling is that of full layers alone.
        ({"rope_theta": 5e5, "rope_scaling": LINEAR}, rope("linear", 5e5, factor=8.0), rope()),
        ({"rope_parameters": {FULL: LINEAR | {"rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 7}}},
         rope("linear", 5e5, factor=8.0), rope(theta=7.0)),
        # Bases that are not given by type are those of the older fields.
        ({"rope_parameters": {FULL: LINEAR, SLIDING: {"rope_type": "default"}}, "rope_theta": 5e5,
          "rope_local_base_freq": 7.0}, rope("linear", 5e5, factor=8.0), rope(theta=7.0)),
        ({"rope_parameters": {FULL: LINEAR, SLIDING: None}}, rope("linear", 1e6, factor=8.0), rope()),
        ({"rope_parameters": {SLIDING: LINEAR}}, rope(theta=1e6), rope("linear", factor=8.0)),
    ],
)  # fmt: skip
def test_gemma_3_has_two_bases(fields, full, sliding):
    assert ropes("gemma3_text", **fields) == (full, sliding)


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, rope(theta=5e5), rope(theta=5e5)),
        # transformers gives sliding layers this base whatever rope_theta says.
        ({"rope_theta": 1e6}, rope(theta=1e6), rope(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": YARN}, rope("yarn", 5e5, **YARN_ROPE), rope(theta=5e5)),
        ({"rope_parameters": {FULL: YARN | {"rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 7.0}}},
         rope("yarn", 1e6, **YARN_ROPE), rope(theta=7.0)),
        ({"rope_parameters": {FULL: YARN}, "rope_theta": 1e6}, rope("yarn", 1e6, **YARN_ROPE), rope(theta=5e5)),
        # By type of layers, transformers does not find truncate, nor a pretraining length one level up.
        ({"rope_scaling": YARN | {"truncate": False}, "original_max_position_embeddings": 64},
         rope("yarn", 5e5, **YARN_ROPE), rope(theta=5e5)),
    ],
)  # fmt: skip
def test_scaling_of_olmo_3_is_for_full_layers(fields, full, sliding):
    assert ropes("olmo3", **fields) == (full, sliding)


PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, rope("proportional", 1e6, partial_rotary_factor=0.25), rope()),
        ({"rope_parameters": {FULL: PROPORTIONAL, SLIDING: {"rope_type": "default", "rope_theta": 7.0}}},
         rope("proportional", 5e5, partial_rotary_factor=0.5), rope(theta=7.0)),
        # Only where no parameters are given, a quarter is rotated, by that type.
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "rope_theta": 5e5}}},
         rope("proportional", 5e5), rope()),
        ({"rope_parameters": {FULL: {"rope_theta": 5e5}}}, rope(theta=5e5), rope()),
    ],
)  # fmt: skip
def test_full_layers_of_gemma_4_turn_a_quarter_of_their_pairs(model_type, fields, full, sliding):
    assert ropes(model_type, **fields) == (full, sliding)


@pytest.mark.parametrize(
    ("parameters", "full", "sliding"),
    [
        (None, rope(theta=5e5, partial_rotary_factor=0.5), rope()),
        ({FULL: YARN | {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
          SLIDING: {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 1.0}},
         rope("yarn", 5e5, **YARN_ROPE, partial_rotary_factor=0.5), rope(theta=7.0)),
        ({FULL: YARN | {"rope_theta": 5e5}}, rope("yarn", 5e5, **YARN_ROPE), rope()),
    ],
)  # fmt: skip
def test_layers_of_laguna_are_rotated_by_type(parameters, full, sliding):
    assert ropes("laguna", layer_types=types("FSSSFS"), rope_parameters=parameters) == (full, sliding)


BY_TYPE = ("gemma3_text", "olmo3", "gemma4_text", "gemma4_unified_text", "laguna")


@pytest.mark.parametrize("model_type", BY_TYPE)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters must be given by type of"),
        ({"rope_parameters": {FULL: {}, "chunked_attention": {}}}, "per layer type are not supported: chunked_attenti"),
        ({"rope_parameters": {FULL: {"rope_type": "su"}}}, "rope_type='su' is not supported"),
        ({"rope_parameters": {FULL: {"rope_type": "linear"}}}, "rope_parameters of full_attention: rope_type='linear"),
        ({"rope_parameters": {SLIDING: {"factor": 2.0}}, "layer_types": types("SF"), "num_hidden_layers": 2},
         "rope_type='default' does not know factor"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {FULL: {}}}, "partial_rotary_factor=0.5 is not supported"),
    ],
)  # fmt: skip
def test_rotations_by_type_that_nothing_honours_are_refused_by_name(model_type, fields, message):
    assert message in refusal(model_type, **fields)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text", "laguna"])
@pytest.mark.parametrize("fields", [{"rope_theta": 1e4}, {"rope_scaling": LINEAR}])
def test_older_rotary_fields_are_refused_where_transformers_never_had_them(model_type, fields):
    [name] = fields
    assert f"config.json sets {name}=" in refusal(model_type, **fields)


def test_a_part_of_all_heads_is_accepted_where_every_type_has_its_own():
    own = {FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, SLIDING: {"partial_rotary_factor": 1.0}}
    fields = {"layer_types": types("FSSSFS"), "rope_parameters": own}
    assert ropes("laguna", **fields, partial_rotary_factor=0.5) == ropes("laguna", **fields)


# Layers that are not rotated.
@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "RRR-RRR-"),
        ({"no_rope_layer_interval": 3}, "RR-RR-RR"),
        ({"no_rope_layers": [1, 0, 0, 1, 1, 0, 1, 1]}, "R--RR-RR"),  # 1 means rotated
        ({"no_rope_layers": [1] * 8, "no_rope_layer_interval": 2}, "RRRRRRRR"),
        ({"no_rope_layers": [0] * 8}, "--------"),
    ],
)
def test_every_fourth_layer_of_smollm3_is_not_rotated(fields, found):
    config = read("smollm3", num_hidden_layers=8, **fields)
    assert rotated(config) == found
    if "R" in found:
        assert config.rope.theta == 2e6
        assert read("smollm3", num_hidden_layers=8, rope_theta=5e6, **fields).rope.theta == 5e6


@pytest.mark.parametrize("found", [[1, 0], [1, 1, 2], "110", []])
def test_flags_of_rotation_that_are_wrong_are_refused(found):
    message = refusal("smollm3", num_hidden_layers=3, no_rope_layers=found)
    assert f"no_rope_layers to 0 or 1 for each of 3 layers, got {found!r}" in message


def test_full_layers_of_exaone_4_are_not_rotated_if_others_have_a_window():
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128}  # fmt: skip
    scaled = rope("llama3", 1e6, 128, factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0)
    fields = {"rope_theta": 1e6, "rope_scaling": scaling}
    assert ropes("exaone4", **fields) == (None, scaled)
    assert only_rope("exaone4", **fields, sliding_window=None) == scaled
    windowless = ModelConfig.from_hf({"model_type": "exaone4", "num_hidden_layers": 2, "layer_types": types("FF")})
    assert rotated(windowless) == "--"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "-RRR-"),
        ({"layer_rope_theta": [0, 0, 5.0, 1e4, 0.0]}, "--RR-"),
        ({"layer_rope_theta": [7.0] * 5}, "RRRRR"),
        ({"layer_rope_theta": None, "layer_types": types("SSSSF")}, "-RRR-"),
    ],
)
def test_layers_of_muse_glimmer_with_a_base_of_0_are_not_rotated(fields, found):
    """Other bases say that a layer is rotated, and not how."""
    config = read("muse_glimmer_text", num_hidden_layers=5, rope_parameters={"rope_theta": 3e4}, **fields)
    assert rotated(config) == found
    assert {layer.rope.theta for layer in config.all_layers if layer.rope} == {3e4}


@pytest.mark.parametrize("found", [[0, 1], 1e4, "0"])
def test_bases_of_layers_that_are_wrong_are_refused(found):
    message = refusal("muse_glimmer_text", num_hidden_layers=3, layer_rope_theta=found)
    assert f"layer_rope_theta to a number for each of 3 layers, got {found!r}" in message


# Rotations of all layers that families name or omit in their own way.
DIVISORS: dict[str, Any] = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
LONG: dict[str, Any] = {"short_factor": (1.0, 1.5), "long_factor": (2.0, 4.0)}
PHI: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_names_of_longrope_in_phi_3(name, key):
    assert only_rope("phi3", **PHI, rope_scaling={key: name, **DIVISORS}) == rope("longrope", 1e4, 4096, **LONG)


@pytest.mark.parametrize(("fields", "original"), [({}, 4096), ({"original_max_position_embeddings": 512}, 512)])
def test_the_pretraining_length_of_phi_3_is_that_one_level_up(fields, original):
    """Or 4096: the one among the rotary parameters does not count."""
    scaling = {"type": "longrope", "original_max_position_embeddings": 64, **DIVISORS}
    assert only_rope("phi3", **PHI, rope_scaling=scaling, **fields) == rope("longrope", 1e4, original, **LONG)
    assert only_rope("phi3", **PHI, **fields) == rope(original=original)


def test_longrope_of_phi_3_has_a_divisor_for_each_rotated_pair():
    fields = {"hidden_size": 32, "num_attention_heads": 4, "partial_rotary_factor": 0.5}
    found = only_rope("phi3", **fields, rope_scaling={"type": "longrope", **DIVISORS})
    assert found == rope("longrope", 1e4, 4096, partial_rotary_factor=0.5, **LONG)
    scaling = {"type": "longrope", **DIVISORS}
    message = refusal("phi3", **(fields | {"partial_rotary_factor": 1.0}), rope_scaling=scaling)
    assert "rope_scaling must set short_factor to a list of 4 numbers, got [1.0, 1.5]" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"short_factor": [1.0] * 2}, "long_factor to a list of 2 numbers, got None"),
        ({"short_factor": [1.0] * 2, "long_factor": [2.0]}, "long_factor to a list of 2 numbers, got [2.0]"),
        (
            {"short_factor": [1.0] * 2, "long_factor": [0.0] * 2},
            "long_factor must consist of positive numbers, got 0.0",
        ),
    ],
)
def test_divisors_of_longrope_are_as_many_positive_numbers_as_pairs(fields, message):
    assert message in refusal("phi3", **PHI, rope_scaling={"type": "longrope", **fields})


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "proportional"])
def test_phi_3_has_no_other_rotations(name):
    """transformers refuses them too."""
    message = refusal("phi3", **PHI, rope_scaling={"type": name, "factor": 2.0})
    assert f"rope_type='{name}' is not supported; allowed: default, longrope" in message


def test_gpt_oss_is_yarn_without_truncation_where_nothing_is_said():
    own: dict[str, Any] = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    assert only_rope("gpt_oss") == rope("yarn", 150000.0, 4096, **own)
    assert only_rope("gpt_oss", rope_theta=1e6, rope_scaling=None) == rope("yarn", 1e6, 4096, **own)
    assert only_rope("gpt_oss", rope_parameters={"rope_type": "default"}) == rope(theta=150000.0)


def test_ministral_3_is_yarn_where_nothing_is_said_and_its_queries_grow():
    own: dict[str, Any] = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = read("ministral3", max_position_embeddings=LENGTH, rope_theta=7.0)
    assert config.rope == rope("yarn", 1e6, 16384, **own) and config.query_growth == (0.1, 16384)
    given = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128,
             "max_position_embeddings": 9}  # fmt: skip
    for beta, growth in ((0.5, (0.5, 128)), (0.0, None)):
        parameters = given | {"llama_4_scaling_beta": beta}
        config = read("ministral3", max_position_embeddings=LENGTH, rope_parameters=parameters)
        assert config.rope == rope("yarn", 5e5, 128, factor=4.0) and config.query_growth == growth
        assert read("ministral3", max_position_embeddings=LENGTH, rope_scaling=parameters) == config
    # The older name wins for the growth too, as it does for the rotation.
    both = {"rope_scaling": given | {"llama_4_scaling_beta": 0.5}, "rope_parameters": given | {"rope_theta": 3.0}}
    assert read("ministral3", **both).query_growth == (0.5, 128)
    assert "lacks llama_4_scaling_beta" in refusal("ministral3", rope_parameters=given)
    del given["original_max_position_embeddings"]
    message = refusal("ministral3", rope_parameters=given | {"llama_4_scaling_beta": 0.5})
    assert "original_max_position_embeddings to a positive integer, beside llama_4_scaling_beta, got None" in message


def test_alpha_of_hunyuan_is_another_base_at_every_length():
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
               "mscale_all_dim": 1.0}  # fmt: skip
    assert only_rope("hunyuan_v1_dense", rope_scaling=scaling) == rope(theta=1e4 * 1000.0 ** (128 / 126))
    small = only_rope("hunyuan_v1_dense", rope_scaling=scaling, head_dim=64, rope_theta=5e5)
    assert small == rope(theta=5e5 * 1000.0 ** (64 / 62))
    dynamic = {"type": "dynamic", "factor": 2.0, "alpha": None}
    assert only_rope("hunyuan_v1_dense", rope_scaling=dynamic) == rope("dynamic", factor=2.0)
    assert "does not know alpha" in refusal("llama", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("model_type", "fields", "share"),
    [
        ("glm4", {}, 0.5),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 0.25),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 1.0}, 1.0),
        ("glm4_moe", {"head_dim": 128}, 0.5),
        ("minimax_m2", {"rotary_dim": 64}, 0.5),
        ("minimax_m2", {}, 1.0),
        ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}, 0.25),
        ("phi3", {"partial_rotary_factor": 0.75}, 0.75),
    ],
)
def test_the_rotated_part_of_heads(model_type, fields, share):
    config = read(model_type, **fields)
    assert config.rope.partial_rotary_factor == share and config.rotary_dim == int(config.head_dim * share)


@pytest.mark.parametrize(
    ("model_type", "theta"),
    [("mixtral", 1e6), ("ernie4_5", 5e5), ("minimax_m2", 5e6), ("smollm3", 2e6), ("gpt_oss", 1.5e5), ("seed_oss", 1e4)],
)
def test_bases_that_are_not_given(model_type, theta):
    assert read(model_type).rope.theta == theta

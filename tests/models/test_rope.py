"""Rotary frequencies of every type agree with recorded values of Hugging Face's implementation."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import RopeConfig, inverse_frequencies, long_frequencies, rope_cos_sin
from kernels_pallas.rotate_and_write.reference import apply_rope
from tests.hf_fixtures import FOLDER
from tests.tolerances import tolerance

RECORDED = json.loads((FOLDER / "rope.json").read_text())


def rope_of(name: str) -> tuple[RopeConfig, int]:
    """A recorded case as the engine reads it from a config.json."""
    entry = RECORDED[name]
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": entry["head_dim"],
            "num_attention_heads": 1,
            "max_position_embeddings": entry["max_position_embeddings"],
            "rope_parameters": entry["rope_parameters"],
        }
    )
    return config.rope, config.head_dim


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_frequencies_match(name):
    frequencies, attention_factor = inverse_frequencies(*rope_of(name))
    np.testing.assert_allclose(frequencies, RECORDED[name]["inverse_frequencies"], rtol=1e-6)
    assert attention_factor == pytest.approx(RECORDED[name]["attention_factor"], rel=1e-7)


def test_the_recorded_cases_cover_every_rope_type():
    """Except longrope and proportional, whose formulas are below, and which the checkpoints of their families cover."""
    assert {rope_of(name)[0].rope_type for name in RECORDED} == {"default", "linear", "dynamic", "llama3", "yarn"}


@pytest.mark.parametrize("name", sorted(set(RECORDED) - {"dynamic"}))
def test_cos_and_sin_are_those_of_position_times_frequency_scaled_by_the_attention_factor(name):
    positions = np.array([0, 1, 17, 4095])
    cos, sin = rope_cos_sin(*rope_of(name), jnp.asarray(positions))
    # The product is rounded to float32, as it is in every implementation; its cosine is taken exactly.
    angles = positions[:, None].astype(np.float32) * np.float32(RECORDED[name]["inverse_frequencies"])
    scale = RECORDED[name]["attention_factor"]
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)) * scale, atol=1e-3)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)) * scale, atol=1e-3)


@pytest.mark.parametrize("length", sorted(map(int, RECORDED["dynamic"]["by_length"])))
def test_dynamic_frequencies_follow_the_length_of_the_sequence(length):
    rope, head_dim = rope_of("dynamic")
    cos, sin = rope_cos_sin(rope, head_dim, jnp.array([1]), jnp.array([length]))
    frequencies = np.array(RECORDED["dynamic"]["by_length"][str(length)])
    np.testing.assert_allclose(np.arctan2(sin[0], cos[0]), frequencies, rtol=tolerance(2e-6))


def test_dynamic_frequencies_change_only_beyond_the_maximum():
    by_length = {int(length): values for length, values in RECORDED["dynamic"]["by_length"].items()}
    assert by_length[1] == by_length[2048] == RECORDED["dynamic"]["inverse_frequencies"]
    assert by_length[2049][1:] != by_length[2048][1:]


def test_without_a_length_a_dynamic_token_counts_itself_as_the_last():
    rope, head_dim = rope_of("dynamic")
    positions = jnp.array([5, 3000, 7776])
    implicit = rope_cos_sin(rope, head_dim, positions)
    explicit = rope_cos_sin(rope, head_dim, positions, positions + 1)
    np.testing.assert_array_equal(implicit, explicit)


SHORT, LONG = (1.0, 1.5, 2.0, 4.0), (2.0, 3.0, 8.0, 16.0)
LONGROPE = RopeConfig("longrope", 1e4, 512, 128, short_factor=SHORT, long_factor=LONG)


def test_longrope_divides_frequencies():
    base = 1e4 ** -(np.arange(0, 8, 2) / 8)
    frequencies, scale = inverse_frequencies(LONGROPE, 8)
    np.testing.assert_allclose(frequencies, base / SHORT, rtol=1e-6)
    np.testing.assert_allclose(long_frequencies(LONGROPE, 8), base / LONG, rtol=1e-6)
    assert scale == pytest.approx((1 + np.log(512 / 128) / np.log(128)) ** 0.5, rel=1e-7)
    assert LONGROPE.turning_length == 128 and RopeConfig().turning_length is None


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"factor": 16.0}, (1 + np.log(16) / np.log(128)) ** 0.5),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.25, "factor": 16.0}, 1.25),
        ({"max_position_embeddings": 128}, 1.0),
        ({"max_position_embeddings": 64}, 1.0),
    ],
)
def test_cos_and_sin_of_longrope_have_one_scale_at_all_lengths(fields, scale):
    rope = dataclasses.replace(LONGROPE, **fields)
    assert inverse_frequencies(rope, 8)[1] == pytest.approx(scale, rel=1e-7)
    cos, sin = rope_cos_sin(rope, 8, jnp.array([7, 7]), jnp.array([128, 129]))
    np.testing.assert_allclose(cos**2 + sin**2, scale**2, rtol=tolerance(1e-6))


def test_all_tokens_of_a_sequence_above_the_original_length_have_the_long_factors():
    positions, lengths = np.array([3, 127, 3, 127, 128, 300]), np.array([4, 128, 129, 400, 129, 400])
    cos, sin = rope_cos_sin(LONGROPE, 8, jnp.asarray(positions), jnp.asarray(lengths))
    divisors = np.array([SHORT, SHORT, LONG, LONG, LONG, LONG])
    angles = positions[:, None] * 1e4 ** -(np.arange(0, 8, 2) / 8) / divisors
    scale = inverse_frequencies(LONGROPE, 8)[1]
    np.testing.assert_allclose(cos, np.cos(angles) * scale, atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * scale, atol=1e-4)
    implicit = rope_cos_sin(LONGROPE, 8, jnp.asarray(positions))
    explicit = rope_cos_sin(LONGROPE, 8, jnp.asarray(positions), jnp.asarray(positions + 1))
    np.testing.assert_array_equal(implicit, explicit)


@pytest.mark.parametrize(("share", "turning"), [(0.25, 2), (0.5, 4), (1.0, 8)])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_proportional_frequencies_are_those_of_a_whole_head_for_its_first_pairs(share, turning, factor):
    rope = RopeConfig("proportional", 1e6, partial_rotary_factor=share, factor=factor)
    assert rope.rotary_dim(16) == 16
    frequencies, scale = inverse_frequencies(rope, 16)
    found = 1e6 ** -(np.arange(0, 16, 2) / 16) / (factor or 1.0)
    np.testing.assert_allclose(frequencies, np.where(np.arange(8) < turning, found, 0.0), rtol=1e-6)
    assert scale == 1.0


def test_rotation_turns_pairs_of_the_two_halves():
    cos, sin = np.cos(0.3), np.sin(0.3)
    x = jnp.array([[[1.0, 0.0, 0.0, 2.0]]])  # one token, one head; pairs (0, 2) and (1, 3)
    rotated = apply_rope(x, jnp.full((1, 2), cos), jnp.full((1, 2), sin))
    np.testing.assert_allclose(rotated[0, 0], [cos, -2 * sin, sin, 2 * cos], rtol=tolerance(1e-6))


def test_scores_depend_on_the_distance_of_positions_only():
    rope, head_dim = rope_of("llama3_1b")
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, head_dim), np.float32)

    def score(q_position: int, k_position: int) -> float:
        rotated = [apply_rope(x, *rope_cos_sin(rope, head_dim, jnp.array([p]))) for x, p in
                   ((q, q_position), (k, k_position))]  # fmt: skip
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(1, 0) == pytest.approx(score(101, 100), abs=1e-3)
    assert score(40, 7) == pytest.approx(score(133, 100), abs=1e-3)
    assert abs(score(40, 7) - score(40, 8)) > 1e-2


def test_half_precision_is_rotated_in_float32():
    rope, head_dim = rope_of("default")
    cos, sin = rope_cos_sin(rope, head_dim, jnp.array([100]))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, head_dim)), jnp.bfloat16)
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, apply_rope(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "su"}, "rope_type must be one of"),
        ({"rope_type": "longrope"}, "needs short_factor"),
        ({"rope_type": "longrope", "short_factor": (1.0,)}, "needs long_factor"),
        (
            {"rope_type": "longrope", "short_factor": (1.0,), "long_factor": (float("inf"),)},
            "long_factor must consist of positive numbers, got inf",
        ),
        (
            {"rope_type": "longrope", "short_factor": ("1",), "long_factor": (1.0,)},
            "short_factor must consist of positive numbers, got '1'",
        ),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be above 0 and at most 1, got 0"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number, got 0"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a positive number, got '2'"),
        ({"theta": float("nan")}, "theta must be a positive number"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate must be true or false"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor (4.0) must be less than high_freq_factor (4.0)",
        ),
    ],
)
def test_bad_values_are_refused_by_name(fields, message):
    with pytest.raises(ValueError) as error:
        RopeConfig(**fields)
    assert message in str(error.value)


def test_a_rope_config_is_a_value():
    assert dataclasses.replace(RopeConfig(), theta=1e6) == RopeConfig(theta=1000000)
    assert hash(RopeConfig()) == hash(RopeConfig())

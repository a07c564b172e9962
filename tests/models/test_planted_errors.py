"""A wrong reading of any switch of a family moves its logits by far more than the tolerance of the comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint import load_checkpoint, read_config
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from tests.hf_fixtures import NAMES, checkpoint_path, expected

TOLERANCE = 1e-4  # of the comparison with transformers
NOTICED = 3 * TOLERANCE  # the exact gelu for the tanh one moves the least

type Wrong = Callable[[ModelConfig], ModelConfig]


@functools.cache
def config_of(name: str) -> ModelConfig:
    return read_config(checkpoint_path(name))[1]


def model_of(name: str, config: ModelConfig | None = None) -> DecoderLM:
    return load_checkpoint(checkpoint_path(name), config=config)[1]


def distance(name: str, model: DecoderLM) -> float:
    """The largest distance of the longest prompt's logits from those of transformers."""
    recorded = expected(name)
    ids = jnp.asarray(recorded.prompts[-1], jnp.int32)
    positions = jnp.arange(len(ids))
    lengths = jnp.full(len(ids), len(ids)) if model.config.rope.turning_length is not None else positions + 1
    hidden = model(ids, positions, CausalAttend(), lengths)
    return float(np.abs(np.asarray(model.logits(hidden)) - recorded.longest_logits).max())


def with_fields(**fields: Any) -> Wrong:
    return lambda config: replace(config, **fields)


def with_experts(**fields: Any) -> Wrong:
    def wrong(config: ModelConfig) -> ModelConfig:
        assert config.experts is not None
        return replace(config, experts=replace(config.experts, **fields))

    return wrong


def with_windows(more: int) -> Wrong:
    """Windows of some tokens more."""

    def wrong(config: ModelConfig) -> ModelConfig:
        assert config.has_windows
        changed = (each if each.window is None else replace(each, window=each.window + more) for each in config.layers)
        return replace(config, layers=tuple(changed))

    return wrong


def without_windows(config: ModelConfig) -> ModelConfig:
    assert config.has_windows
    return replace(config, layers=tuple(replace(each, window=None) for each in config.layers))


def with_the_other_rope(config: ModelConfig) -> ModelConfig:
    """Each kind of layers rotated as the other kind is."""
    first = {each.rope for each in config.layers if each.window is None}.pop()
    other = {each.rope for each in config.layers if each.window is not None}.pop()
    assert first != other
    return replace(
        config, layers=tuple(replace(each, rope=other if each.rope == first else first) for each in config.layers)
    )


def with_all_rotated(config: ModelConfig) -> ModelConfig:
    assert any(each.rope is None for each in config.layers)
    return replace(config, layers=tuple(replace(each, rope=config.rope) for each in config.layers))


def with_the_cap_before_the_scale(config: ModelConfig) -> ModelConfig:
    """scale * cap * tanh(x / cap) instead of cap * tanh(scale * x / cap)."""
    assert config.score_cap is not None and config.attention_scale is not None
    return replace(config, score_cap=config.attention_scale * config.score_cap)


def with_rope(**fields: Any) -> Wrong:
    def wrong(config: ModelConfig) -> ModelConfig:
        layers = tuple(
            replace(each, rope=None if each.rope is None else replace(each.rope, **fields)) for each in config.layers
        )
        return replace(config, rope=replace(config.rope, **fields), layers=layers)

    return wrong


WRONG: list[tuple[str, str, Wrong]] = [
    *((name, "window + 1", with_windows(1)) for name in NAMES if config_of(name).has_windows),
    *((name, "window - 1", with_windows(-1)) for name in NAMES if config_of(name).has_windows),
    *((name, "no window", without_windows) for name in ("gpt_oss", "mistral_window", "gemma4_e2b")),
    *((name, "the other kind's rope", with_the_other_rope) for name in ("gemma3", "gemma4_moe", "laguna", "olmo3")),
    *((name, "rope everywhere", with_all_rotated) for name in ("exaone4", "muse_glimmer", "smollm3")),
    *((name, "weight for 1 + weight", with_fields(norm_offset="none")) for name in ("gemma2", "gemma3")),
    ("muse_glimmer", "weight for 1 + weight", with_fields(norm_offset="none")),
    ("muse_glimmer", "1 + weight in the last norm", with_fields(norm_offset="all")),
    ("gemma4", "1 + weight for weight", with_fields(norm_offset="all")),
    *((name, "exact gelu", with_fields(hidden_act="gelu")) for name in ("gemma2", "gemma3", "gemma4", "gemma4_e2b")),
    ("gemma2", "no cap of scores", with_fields(score_cap=None)),
    ("gemma2", "cap before scale", with_the_cap_before_the_scale),
    *((name, "scale of the heads", with_fields(attention_scale=None)) for name in ("gemma2", "gemma3", "gemma4")),
    *((name, "no cap of logits", with_fields(logit_cap=None)) for name in ("gemma2", "gemma4", "muse_glimmer")),
    *((name, "no scale of embeddings", with_fields(embed_scale=1.0)) for name in ("gemma3", "granite")),
    ("granite", "scale of the heads", with_fields(attention_scale=None)),
    ("granite", "no residual scale", with_fields(residual_scale=1.0)),
    ("granite", "no scale of logits", with_fields(logit_scale=1.0)),
    ("muse_glimmer", "no scale of logits", with_fields(logit_scale=1.0)),
    ("muse_glimmer", "no factor of queries", with_fields(q_factor=1.0)),
    ("muse_glimmer", "no norm of embeddings", with_fields(embed_norm=False)),
    ("muse_glimmer", "one epsilon", with_fields(post_norm_eps=None)),
    ("muse_glimmer", "another gate", with_fields(gate="softplus")),
    ("laguna", "another gate", with_fields(gate="sigmoid")),
    ("gemma4", "values without a norm", with_fields(v_norm=False)),
    ("ministral3", "queries that do not grow", with_fields(query_growth=None)),
    ("hunyuan_v1_dense", "norm before the rotation", with_fields(qk_norm_of="head")),
    *((name, "halves for neighbours", with_fields(pairs_neighbours=False)) for name in ("ernie4_5", "glm4")),
    *((name, "neighbours for halves", with_fields(pairs_neighbours=True)) for name in ("glm4_moe", "llama3_tied")),
    ("phi3_longrope", "short factors", with_rope(original_max_position_embeddings=4096, attention_factor=1.0)),
    ("qwen3_yarn_tied", "no factor of yarn", with_rope(attention_factor=1.0)),
    ("gpt_oss", "no limit of gates", with_experts(gate_limit=1e9)),
    ("gpt_oss", "slope of a plain gate", with_experts(gate_slope=1.0)),
    *((name, "no scale of experts", with_experts(scaling=1.0)) for name in ("glm4_moe", "laguna")),
    *((name, "other scores of experts", with_experts(score="softmax")) for name in ("glm4_moe", "minimax_m2")),
    ("laguna_element", "no cap of the router", with_experts(logit_cap=None)),
    *((name, "no sum to one", with_experts(normalizes=False)) for name in ("glm4_moe", "mixtral", "qwen3_moe")),
    *((name, "a sum to one", with_experts(normalizes=True)) for name in ("qwen2_moe", "qwen3_moe_mixed")),
]  # fmt: skip


def cases() -> list[Any]:
    """All wrong readings; each runs by default on the first family that is named with it."""
    firsts = {what: name for name, what, _ in reversed(WRONG)}
    return [
        pytest.param(name, wrong, id=f"{name}-{what}", marks=[] if firsts[what] == name else [pytest.mark.slow])
        for name, what, wrong in WRONG
    ]


@pytest.mark.parametrize(("name", "wrong"), cases())
def test_a_wrong_reading_moves_the_logits(name, wrong):
    assert distance(name, model_of(name, wrong(config_of(name)))) > NOTICED


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "phi3_longrope"])
def test_the_right_reading_does_not(name):
    assert distance(name, model_of(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("times", [0, 2])
def test_a_sink_that_is_left_out_or_counted_twice_moves_the_logits(name, times):
    model = model_of(name)
    for layer in model.layers:
        sinks = layer.attention.sinks
        assert sinks is not None
        sinks.set_value(sinks[...] + (np.log(times) if times else -1e9))
    assert distance(name, model) > NOTICED

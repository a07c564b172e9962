"""Mixtures of experts against loops in NumPy: which experts, with which weights, and their sum."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.residual import FEATURES_FIRST, PLAIN
from jaxinfer.models.config import ModelConfig, UnsupportedConfigError
from jaxinfer.models.experts import SparseMLP, choose_experts
from jaxinfer.models.experts_config import ExpertsConfig

PLAIN_ROUTER = ExpertsConfig(num_experts=16, experts_per_token=4, intermediate_size=24)
GROUPS = ExpertsConfig(
    num_experts=16, experts_per_token=4, intermediate_size=24, score="sigmoid", has_bias=True, scaling=2.5,
    num_groups=4, kept_groups=2,
)  # fmt: skip
ROUTERS = {
    "softmax": PLAIN_ROUTER,
    "softmax, weights as they are": dataclasses.replace(PLAIN_ROUTER, normalizes=False),
    "groups with a bias": GROUPS,
    "a bias without groups": dataclasses.replace(GROUPS, num_groups=0, kept_groups=0),
    "groups, weights as they are": dataclasses.replace(GROUPS, normalizes=False),
    "one expert": dataclasses.replace(PLAIN_ROUTER, experts_per_token=1),
    "all experts": dataclasses.replace(PLAIN_ROUTER, experts_per_token=16),
}


def inputs_of(config: ExpertsConfig, count: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, config.num_experts)).astype(np.float32)
    # Below what scores can be, so that most scores with a bias are negative.
    return logits, rng.normal(-1, 0.3, config.num_experts).astype(np.float32) if config.has_bias else None


def expected_weights(
    logits: np.ndarray, config: ExpertsConfig, bias: np.ndarray | None, *, bug: str | None = None
) -> np.ndarray:
    """float64 [T, E]: the weight of every expert, 0 where a token does not go to it."""
    found = np.zeros(logits.shape)
    for token, row in enumerate(logits.astype(np.float64)):
        scores = 1 / (1 + np.exp(-row)) if config.score == "sigmoid" else np.exp(row) / np.exp(row).sum()
        ranked = scores if bias is None or bug == "no bias" else scores + bias
        if config.num_groups and bug != "no groups":
            groups = np.split(np.arange(config.num_experts), config.num_groups)
            count = 1 if bug == "the best alone" else 2
            best = [np.sort(ranked[group])[-count:].sum() for group in groups]
            for place in np.argsort(best)[: config.num_groups - config.kept_groups]:
                ranked = ranked.copy()
                ranked[groups[place]] = 0 if bug == "0 instead of -inf" else -np.inf
        chosen = np.argsort(-ranked, kind="stable")[: config.experts_per_token]
        weights = (scores if bias is None or bug != "weights with the bias" else scores + bias)[chosen]
        if config.normalizes and bug != "not normalised":
            weights = weights / weights.sum()
        found[token, chosen] = weights * (1 if bug == "not scaled" else config.scaling)
    return found


def chosen_weights(logits: np.ndarray, config: ExpertsConfig, bias: np.ndarray | None) -> np.ndarray:
    experts, weights = choose_experts(jnp.asarray(logits), config, None if bias is None else jnp.asarray(bias))
    assert experts.dtype == jnp.int32 and weights.dtype == jnp.float32
    found = np.zeros(logits.shape)
    np.put_along_axis(found, np.asarray(experts), np.asarray(weights), axis=1)
    return found


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_and_weighs_as_a_loop_does(name):
    logits, bias = inputs_of(ROUTERS[name])
    expected = expected_weights(logits, ROUTERS[name], bias)
    np.testing.assert_allclose(chosen_weights(logits, ROUTERS[name], bias), expected, atol=1e-6)


@pytest.mark.parametrize(
    "bug",
    ["no bias", "no groups", "the best alone", "0 instead of -inf", "weights with the bias", "not normalised",
     "not scaled"],
)  # fmt: skip
def test_a_router_with_a_bug_would_be_noticed(bug):
    logits, bias = inputs_of(GROUPS)
    wrong = expected_weights(logits, GROUPS, bias, bug=bug)
    assert np.abs(chosen_weights(logits, GROUPS, bias) - wrong).max() > 1e-2


def sparse_mlp(experts: ExpertsConfig, seed: int = 0) -> SparseMLP:
    config = ModelConfig(
        "BailingMoeV2ForCausalLM", vocab_size=8, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, max_position_embeddings=64, experts=experts,
    )  # fmt: skip
    mlp = SparseMLP(config, jnp.dtype(jnp.float32), nnx.Rngs(seed))
    if mlp.router.bias is not None:
        mlp.router.bias.set_value(jnp.asarray(inputs_of(experts)[1]))
    return mlp


def silu_mlp(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Apply a gated MLP: x [T, hidden], gate_up [f, 2, hidden] and down [hidden, f]."""
    gate, up = (x @ gate_up[:, part].T for part in range(2))
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("shared", [0, 40])
def test_the_sum_is_that_of_each_expert_over_all_tokens(name, tokens, shared):
    config = dataclasses.replace(ROUTERS[name], shared_size=shared)
    mlp = sparse_mlp(config)
    x = np.random.default_rng(1).standard_normal((tokens, 32)).astype(np.float32)
    logits = x @ np.asarray(mlp.router.kernel[...]).T
    weights = expected_weights(logits, config, None if mlp.router.bias is None else np.asarray(mlp.router.bias[...]))
    gate_up, down = np.asarray(mlp.gate_up.kernel[...]), np.asarray(mlp.down.kernel[...])
    expected = sum(weights[:, [e]] * silu_mlp(x, gate_up[e], down[e]) for e in range(config.num_experts))
    if mlp.shared is not None:
        expected += silu_mlp(x, np.asarray(mlp.shared.gate_up.kernel[...]), np.asarray(mlp.shared.down.kernel[...]))
    np.testing.assert_allclose(mlp(jnp.asarray(x), PLAIN), expected, rtol=0, atol=2e-5)
    features_first = mlp(jnp.asarray(x).T, FEATURES_FIRST)
    np.testing.assert_allclose(features_first.T, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 17}, "num_experts_per_tok=17"),
        ({"score": "relu"}, "softmax, sigmoid, got 'relu'"),
        ({"num_groups": 3}, "n_group=3"),
        ({"num_groups": 16, "kept_groups": 4}, "n_group=16"),
        ({"num_groups": 4, "kept_groups": 5}, "topk_group=5"),
        ({"num_groups": 8, "kept_groups": 1}, "topk_group=1 of n_group=8 do not hold num_experts_per_tok=4"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_name(fields, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        dataclasses.replace(PLAIN_ROUTER, **fields)

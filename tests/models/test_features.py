"""Features for a drafter are the inputs of layers, as they are in the residual stream."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.attention.residual import FEATURES_FIRST, PLAIN, Residual
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import build_model
from kernels_pallas.add_and_norm.reference import rms_norm

CONFIG = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=6, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position_embeddings=64, qk_norm=True,
)  # fmt: skip
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 61, 12), jnp.int32)
POSITIONS = jnp.arange(12, dtype=jnp.int32)


@pytest.mark.parametrize("residual", [PLAIN, FEATURES_FIRST], ids=["tokens first", "features first"])
def test_they_are_what_a_model_of_the_layers_below_norms_at_its_end(residual: Residual) -> None:
    model = build_model(CONFIG, rngs=nnx.Rngs(3))
    found = model.with_kv([None] * 6, IDS, POSITIONS, CausalAttend(), residual=residual, capture=(1, 3, 5))
    assert found.features is not None and found.features.shape == (12, 96)
    for number, features in zip((1, 3, 5), jnp.split(found.features, 3, axis=-1), strict=True):
        below = build_model(CONFIG, rngs=nnx.Rngs(3))
        below.layers = nnx.List(below.layers[:number])
        normed = rms_norm(features, model.final_norm.scale[...], CONFIG.rms_norm_eps)
        np.testing.assert_allclose(normed, below(IDS, POSITIONS, CausalAttend()), atol=2e-5)


def test_nothing_is_captured_where_nobody_asks() -> None:
    model = build_model(CONFIG)
    assert model.with_kv([None] * 6, IDS, POSITIONS, CausalAttend()).features is None


def test_layers_that_are_not_there_are_noticed() -> None:
    model = build_model(CONFIG)
    with pytest.raises(AssertionError, match="are not layers"):
        model.with_kv([None] * 6, IDS, POSITIONS, CausalAttend(), capture=(1, 6))

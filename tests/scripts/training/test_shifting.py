"""A diffusion model begins as the autoregressive model that it is made from, shifted by one position."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import build_model
from kernels_pallas.rotate_and_write.reference import rotate
from tests.scripts.training.mixtures import EXPERTS, dense_config
from training.dense_experts import with_experts
from training.initialization import random_parameters
from training.loop import module_of
from training.shifting import with_shift

MASK = 63
DENSE = dense_config(hidden_size=128, head_dim=64, num_layers=2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Causal:
    """An `Attend` of one text; a layer whose `kv` is 0 does not see the first token."""

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = rotate(heads)
        place = jnp.arange(len(q))
        seen = (place[None, :] <= place[:, None]) & ((place[None, :] > 0) | (kv > 0) | (place[:, None] == 0))
        return masked_attention(q, k, v, seen), kv


@pytest.fixture
def dense() -> DecoderLM:
    """Its embeddings are equally long and have a direction in common, as trained ones nearly do."""
    model = build_model(DENSE, rngs=nnx.Rngs(0))
    table = np.random.default_rng(1).normal(size=(64, 128))
    table[:, 0] = 1 + abs(table[:, 0])
    model.embed.embedding[...] = jnp.asarray(table / np.sqrt((table**2).mean(axis=1, keepdims=True)) / 10, jnp.float32)
    return model


def test_it_says_in_every_place_what_the_other_said_before_it(dense):
    mixture, graph, params = with_experts(
        DENSE, dense, EXPERTS, 1, architecture="LLaDA2MoeModelLM", block_size=4, mask_token_id=MASK, num_layers=3
    )
    params = with_shift(params, mixture, MASK)
    model = module_of(graph, params)
    assert isinstance(model, DecoderLM)
    ids = jnp.array(np.random.default_rng(2).integers(0, MASK, 40))
    place, everything, all_but_first = jnp.arange(40), jnp.array(1), jnp.array(0)
    said = dense.logits(dense.with_kv([everything] * 2, ids, place, Causal()).hidden)
    # The first token is still in its own place, besides in the next one.
    kv = [everything, all_but_first, all_but_first]
    found = model.logits(model.with_kv(kv, ids, place, Causal()).hidden)
    np.testing.assert_allclose(found[1:], said[:-1], atol=2e-3)
    assert float(jnp.abs(found[:-1] - said[:-1]).max()) > 0.5
    # Masks are as long as everything else: a place after one knows no more than that.
    assert np.isclose(*(float(jnp.linalg.norm(params["embed.embedding"][word])) for word in (MASK, 5)), rtol=1e-4)


def test_heads_that_do_not_hold_all_features_are_refused(dense):
    config = replace(DENSE, num_kv_heads=4)
    graph, params = random_parameters(config, 0)
    with pytest.raises(ValueError, match="4 groups of 1 heads of 64 do not hold 128 features twice"):
        with_shift(params, config, MASK)


def test_embeddings_without_a_common_direction_are_refused():
    _, params = random_parameters(DENSE, 0)
    table = params["embed.embedding"]
    params["embed.embedding"] = table.at[5].set(-table[6])
    with pytest.raises(ValueError, match="no direction is common"):
        with_shift(params, DENSE, MASK)

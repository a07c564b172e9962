"""A model computes the same in either layout of its activations: tokens first or features first."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import select_backend
from jaxinfer.attention.dense import CausalAttend
from jaxinfer.attention.residual import FEATURES_FIRST, PLAIN
from tests.builders import FAMILIES, model_config, random_model, random_prompts


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_first_gives_the_same_hidden_states(family, tokens):
    model = random_model(model_config(family))
    ids = jnp.asarray(random_prompts([tokens])[0])
    plain, first = (
        model(ids, jnp.arange(tokens), CausalAttend(), residual=residual) for residual in (PLAIN, FEATURES_FIRST)
    )
    assert first.shape == plain.shape == (tokens, model.config.hidden_size)
    np.testing.assert_allclose(first, plain, rtol=0, atol=1e-4)


def test_on_a_cpu_steps_of_few_tokens_have_their_features_first():
    backend = select_backend("xla")
    first = [tokens for tokens in (1, 2, 16, 24, 256, 257, 2048) if backend.residual(tokens).features_first]
    assert first == [2, 16, 24, 256]

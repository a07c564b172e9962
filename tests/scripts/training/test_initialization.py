"""Copying heads that are built in before training: what they look at, and that they copy."""

import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.dense import CausalAttend
from training.initialization import initial_parameters, model_config, random_parameters
from training.loop import module_of

LENGTH = 40


def second_half(params_of) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the second half of random sequences that consist of the same tokens twice, and the tokens that follow.
    A token's own logit, which every tied model starts with, is left out."""
    graph, params = params_of(model_config(1), 0)
    half = np.random.default_rng(0).integers(300, 2000, (8, LENGTH))
    ids = np.concatenate([half, half], axis=1)
    model = module_of(graph, params)
    positions = jnp.broadcast_to(jnp.arange(2 * LENGTH), ids.shape)
    hidden = model(jnp.asarray(ids), positions, CausalAttend(jnp.ones(ids.shape, jnp.int32)))
    logits = np.array(model.logits(hidden))
    np.put_along_axis(logits, ids[..., None], -np.inf, axis=-1)
    return logits[:, LENGTH:-1], ids[:, LENGTH + 1 :]


def test_an_untrained_model_continues_what_it_has_seen_before():
    logits, following = second_half(initial_parameters)
    assert (logits.argmax(axis=-1) == following).mean() > 0.8


def test_without_built_heads_it_does_not():
    logits, following = second_half(random_parameters)
    assert (logits.argmax(axis=-1) == following).mean() < 0.02


def test_the_same_seed_gives_the_same_parameters():
    first, second = (initial_parameters(model_config(1), 3)[1] for _ in range(2))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)

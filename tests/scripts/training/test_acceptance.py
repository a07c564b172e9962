"""What a draft model's proposals are worth: token by token, in chains, and by the classic rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.sampler import SamplingBatch, sample
from training.acceptance import Acceptance, Proposals, chains, proposals


def sampling(temperature: float, count: int) -> SamplingBatch:
    keys = jnp.tile(jnp.array([0, 7], jnp.uint32), (count, 1))
    ones, off = jnp.ones(count), jnp.zeros(count, jnp.int32)
    return SamplingBatch(temperature * ones, off, ones, 0 * ones, keys, jnp.arange(count))


def logits(seed: int, count: int, vocab: int = 5) -> jax.Array:
    return 2 * jax.random.normal(jax.random.key(seed), (count, vocab))


def flags(text: str) -> np.ndarray:
    return np.array([letter == "+" for letter in text])


def test_greedy_proposals_are_accepted_where_both_models_find_the_same_token_most_likely():
    target = jnp.log(jnp.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.4, 0.35, 0.25]]))
    draft = jnp.log(jnp.array([[0.4, 0.3, 0.3], [0.5, 0.2, 0.3], [0.6, 0.2, 0.2]]))
    found = proposals(target, draft, jnp.array([0, 2, 0]), sampling(0.0, 3))
    assert found.redrawn.tolist() == [True, True, True]
    for accepted in (found.same_noise, found.most_likely, found.classic == 1):
        assert accepted.tolist() == [True, False, True]


def test_the_engines_own_tokens_are_drawn_again():
    target, params = logits(0, 400), sampling(0.8, 400)
    found = proposals(target, logits(1, 400), sample(target, params), params)
    assert found.redrawn.all() and not found.same_noise.all()


def test_a_perfect_draft_model_is_always_right_with_the_same_noise_and_by_the_classic_rule():
    target, params = logits(0, 400), sampling(0.8, 400)
    found = proposals(target, target, sample(target, params), params)
    assert found.same_noise.all()
    np.testing.assert_allclose(found.classic, 1.0, rtol=1e-5)
    assert 0.2 < np.mean(found.most_likely) < 0.95


def test_the_classic_rule_accepts_the_overlap_of_both_distributions_at_the_temperature():
    p, q = np.array([[0.6, 0.3, 0.1]]), np.array([[0.2, 0.3, 0.5]])
    found = proposals(0.5 * jnp.log(p), 0.5 * jnp.log(q), jnp.array([0]), sampling(0.5, 1))
    np.testing.assert_allclose(found.classic, [0.2 + 0.3 + 0.1], rtol=1e-5)


@pytest.mark.parametrize(
    "text, accepted, drafted",
    [
        ("++++++++", 7, 7),  # four, one of the target, three more
        ("----", 0, 4 + 3 + 2 + 1),
        ("+-++-+", 1 + 2 + 1, 4 + 4 + 1),
        ("", 0, 0),
    ],
)
def test_a_chain_ends_at_its_first_wrong_token_and_the_next_begins_behind_it(text, accepted, drafted):
    assert chains([flags(text)], 4) == (accepted, drafted)


def test_figures_are_those_of_all_tokens_of_all_texts():
    one, two = (
        Proposals(*(flags(text), flags(text), flags(text), flags(text).astype(np.float32)))  # pyright: ignore
        for text in ("++++", "-")
    )
    figures = Acceptance.of([one, two])
    assert (figures.tokens, figures.same_noise, figures.classic) == (5, 0.8, pytest.approx(0.8))
    assert figures.chained == 4 / 5

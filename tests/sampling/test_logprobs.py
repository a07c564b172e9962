"""Log probabilities and ranks of chosen and of the most likely tokens."""

import jax
import numpy as np
import pytest

from jaxinfer.limits import MAX_LOGPROBS
from jaxinfer.sampling.logprobs import token_logprobs
from tests.sampling.reference import log_softmax
from tests.tolerances import tolerance


def run(logits: np.ndarray, tokens: np.ndarray):
    return jax.tree.map(np.asarray, jax.jit(token_logprobs)(logits, tokens))


@pytest.fixture(params=[7, 300])
def logits(request) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 4, (6, request.param)).astype(np.float32)


def test_a_chosen_token_has_its_log_probability(logits):
    tokens = np.arange(6, dtype=np.int32)
    np.testing.assert_allclose(run(logits, tokens).logprob, log_softmax(logits)[tokens, tokens], atol=tolerance(1e-5))


def test_a_rank_is_one_more_than_the_number_of_likelier_tokens(logits):
    order = np.argsort(-logits, axis=-1)
    for rank in range(6):
        assert np.all(run(logits, order[:, rank].astype(np.int32)).rank == rank + 1)


def test_the_most_likely_tokens_come_in_order_with_their_log_probabilities(logits):
    found = run(logits, np.zeros(6, np.int32))
    count = min(MAX_LOGPROBS, logits.shape[-1])
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(found.likely.token, expected)
    truth = np.take_along_axis(log_softmax(logits), expected, axis=-1)
    np.testing.assert_allclose(found.likely.logprob, truth, atol=tolerance(1e-5))


def test_equally_likely_tokens_share_a_rank_and_come_by_id():
    found = run(np.zeros((1, 30), np.float32), np.array([17], np.int32))
    assert found.rank.tolist() == [1]
    assert found.likely.token[0].tolist() == list(range(MAX_LOGPROBS))


def test_logits_far_from_zero_do_not_overflow():
    found = run(np.array([[3e4, 3e4 - 2.0, -3e4]], np.float32), np.array([1], np.int32))
    np.testing.assert_allclose(found.logprob, [-2 - np.log1p(np.exp(-2.0))], atol=1e-2)

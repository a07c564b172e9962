"""The rule of speculative sampling on single rows: no division by zero, first rejection, the right rows."""

import itertools

import numpy as np
import pytest

from jaxinfer.textbook.speculative.classic_rule import acceptance_probability, max_fn, residual, verify
from jaxinfer.textbook.speculative.random_streams import Streams
from tests.textbook.speculative.toys import outcomes


def rows(count, vocab_size, seed, *, zeros=False):
    weights = np.random.default_rng(seed).random((count, vocab_size))
    if zeros:
        weights[weights < 0.4] = 0.0
        weights[:, seed % vocab_size] += 0.1
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_accepted_and_residual_mass_add_up_to_the_target(seed, zeros):
    p, q = rows(1, 6, seed, zeros=zeros)[0], rows(1, 6, seed + 50, zeros=zeros)[0]
    accepted = np.array([q[x] * acceptance_probability(p, q, x) for x in range(6)])
    np.testing.assert_allclose(accepted + (1 - accepted.sum()) * residual(p, q), p, atol=1e-15)


def test_equal_distributions_accept_everything_and_leave_no_nan():
    p = rows(1, 5, 0)[0]
    assert all(acceptance_probability(p, p, x) == 1.0 for x in range(5))
    np.testing.assert_array_equal(residual(p, p), p)


def test_a_draft_that_the_drafter_could_not_draw_divides_nothing_by_zero():
    p, q = np.array([0.5, 0.5, 0.0]), np.array([1.0, 0.0, 0.0])
    with np.errstate(all="raise"):
        assert [acceptance_probability(p, q, x) for x in range(3)] == [0.5, 1.0, 0.0]


def test_a_lookup_is_accepted_with_its_probability_and_left_out_of_the_residual():
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.0, 1.0, 0.0])
    assert acceptance_probability(p, q, 1) == 0.5
    np.testing.assert_allclose(residual(p, q), [0.4, 0.0, 0.6])


def test_one_round_gives_each_prefix_the_probability_that_the_target_gives_it():
    p, q = rows(3, 4, 1), rows(2, 4, 2)  # rows that depend on the place alone
    tokens: dict[tuple[int, ...], float] = {}
    for first, second in itertools.product(range(4), repeat=2):

        def run(streams: Streams, drafts=(first, second)):
            verdict = verify(p, q, drafts, streams)
            return (*drafts[: verdict.num_accepted], verdict.token)

        for found, chance in outcomes(run).items():
            tokens[found] = tokens.get(found, 0.0) + q[0, first] * q[1, second] * chance
    for place in range(3):
        longer = {found: chance for found, chance in tokens.items() if len(found) > place}
        for prefix in itertools.product(range(4), repeat=place):
            row = np.array([sum(c for f, c in longer.items() if f[: place + 1] == (*prefix, x)) for x in range(4)])
            np.testing.assert_allclose(row / row.sum(), p[place], atol=1e-14)


def test_without_drafts_the_token_is_drawn_from_the_target():
    p = rows(1, 3, 4)
    found = outcomes(lambda streams: [verify(p, np.zeros((0, 3)), [], streams).token])
    np.testing.assert_allclose([found[(x,)] for x in range(3)], p[0])


def test_the_sample_adjustment_is_the_positive_part_by_its_sum():
    p, q = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]), np.array([[0.2, 0.2, 0.6], [0.3, 0.1, 0.6]])
    np.testing.assert_allclose(max_fn(p - q), [[0.75, 0.25, 0], [0, 0.5, 0.5]])
    with pytest.raises(ValueError, match="positive"):
        max_fn(p - p)

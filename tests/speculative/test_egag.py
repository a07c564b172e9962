"""Draft lengths by entropy: the formula, its rounding, its limits."""

import math

import numpy as np
import pytest

from jaxinfer.speculative.egag import EntropyGamma, entropy_of, round_half_up
from jaxinfer.textbook.speculative.generate import speculative_generate
from tests.textbook.speculative.toys import TableModel, table_model


def test_halves_are_rounded_up():
    assert [round_half_up(x) for x in (0.5, 1.5, 2.5, 2.4999, -0.5)] == [1, 2, 3, 2, 0]


def test_entropy_is_in_nats_and_zeros_add_nothing():
    assert entropy_of(np.full(8, 1 / 8)) == pytest.approx(math.log(8))
    assert entropy_of(np.array([1.0, 0.0])) == 0.0


@pytest.mark.parametrize(
    ("share", "gamma"), [(0.0, 6), (0.1, 6), (0.11, 5), (0.5, 4), (0.7, 3), (0.9, 2), (0.91, 1), (1.0, 1)]
)
def test_gamma_falls_in_a_line_with_the_entropy(share, gamma):
    reading = EntropyGamma(100, 1, 6, scale=1.0).observe(share * math.log(100))
    assert (reading.normalised, reading.gamma) == (pytest.approx(share), gamma)


def test_the_scale_says_which_entropy_is_uncertain():
    readings = [EntropyGamma(100, 1, 5, scale=0.2).observe(share * math.log(100)) for share in (0.05, 0.2, 0.4)]
    assert [reading.smoothed for reading in readings] == pytest.approx([0.25, 1.0, 1.0])
    assert [reading.gamma for reading in readings] == [4, 1, 1]


def test_a_running_scale_is_the_greatest_entropy_so_far():
    egag = EntropyGamma(100, 1, 5, scale="running")
    assert [egag.observe(x).gamma for x in (0.4, 0.1, 0.0, 0.8, 0.4)] == [1, 4, 5, 1, 3]
    assert [EntropyGamma(100, 1, 5, scale="running").observe(0.0).gamma for _ in range(2)] == [5, 5]


def test_a_drafter_of_constant_entropy_drafts_by_that_entropy_and_not_the_least():
    egag, running = EntropyGamma(100, 1, 5), EntropyGamma(100, 1, 5, scale="running")
    readings = [(egag.observe(0.1 * math.log(100)).gamma, running.observe(0.1 * math.log(100)).gamma) for _ in range(9)]
    assert set(readings) == {(5, 1)}


def test_the_average_starts_with_the_first_entropy():
    egag = EntropyGamma(100, 1, 5, ema_beta=0.75, scale=1.0)
    found = [egag.observe(share * math.log(100)).smoothed for share in (0.8, 0.0, 0.4)]
    assert found == pytest.approx([0.8, 0.6, 0.55])


def test_gamma_stays_within_its_limits_whatever_the_entropy():
    egag = EntropyGamma(10, 2, 4, ema_beta=0.3)
    assert all(2 <= egag.observe(x).gamma <= 4 for x in np.linspace(-1, 5, 50))
    assert EntropyGamma(10, 3, 3).observe(1.0).gamma == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, 5), "vocab_size must be at least 2, got 1"),
        ((10, 0, 5), "gamma_min must be .* got 0"),
        ((10, 6, 5), r"gamma_min must be from 1 to gamma_max \(5\), got 6"),
        ((10, 1, 5, 1.0), "egag_ema_beta must be .* got 1.0"),
        ((10, 1, 5, 0.0, 0.0), "entropy_scale must be .* got 0.0"),
        ((10, 1, 5, 0.0, "sometimes"), "entropy_scale must be .* got 'sometimes'"),
        ((10, 1, 5, 0.0, True), "entropy_scale must be .* got True"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        EntropyGamma(*arguments)


def test_a_drafter_drafts_much_where_it_is_sure_and_little_where_it_is_not():
    # Counts to 6 again and again: sure of it after 0, 1, 2, and not after 3, 4, 5.
    certainty = np.array([20, 20, 20, 1, 1, 1])[:, None]
    table = np.broadcast_to(certainty * np.roll(np.eye(6), 1, axis=1), (6, 6, 6))
    target, drafter = TableModel(table), TableModel(table)
    tokens, rate = speculative_generate(
        [1, 2], drafter, target, use_egag=True, gamma_min=1, gamma_max=4, max_gen_len=40, eos_tokens_id=[]
    )
    rounds = target.read[1:-1]  # from the newest token on: without the first token, and the round that the end cuts
    sure = [count - 1 for start, count in rounds if tokens[start - 2] < 3]
    unsure = [count - 1 for start, count in rounds if tokens[start - 2] >= 3]
    assert rate == 1.0 and set(sure) == {4} and set(unsure) == {1}


def test_rounds_are_logged_with_their_entropy_length_and_acceptance(caplog):
    caplog.set_level("DEBUG", "jaxinfer.textbook")
    speculative_generate([1, 2], table_model(6, 1), table_model(6, 2), use_egag=True, eos_tokens_id=[])
    assert "accepted, entropy EntropyReading(normalised=" in caplog.text

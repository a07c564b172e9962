"""Biases, bans, allowed sets and penalties by seat, against the words that define them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.limits import MAX_LOGIT_BIAS
from jaxinfer.sampling.bounds import Bounded, Bounds, counted, of_rows, unpacked
from tests.sampling.bounds_cases import CASES, OUTPUT, VOCAB, bits_of, enter, nobody, random_logits
from tests.sampling.reference import adjusted
from tests.tolerances import tolerance


def run(logits: np.ndarray, bounds: Bounds, seats: list[int], path: list[list[int]], position: int = 10) -> np.ndarray:
    seat = np.asarray(seats)
    bounded = Bounded(bounds, seat, np.full(seat.shape, position), np.asarray(path, np.int32))  # type: ignore[arg-type]
    return np.asarray(jax.jit(Bounded.hold)(bounded, logits))


@pytest.mark.parametrize("ahead", range(len(OUTPUT) + 1))
@pytest.mark.parametrize("name", CASES)
def test_logits_are_adjusted_as_the_reference_says_however_many_outputs_are_counted(name, ahead):
    """The last `ahead` of them are the latest token and drafts."""
    case, logits = CASES[name], random_logits(3)
    outputs = list(case.get("output", ()))
    ahead = min(ahead, len(outputs))
    bounds = nobody(4)
    enter(bounds, 2, case, outputs=outputs[: len(outputs) - ahead])
    path = [-1] * (6 - ahead) + outputs[len(outputs) - ahead :]
    out = run(logits, bounds, [0, 2, 4], [[-1] * 6, path, [-1] * 6])
    np.testing.assert_allclose(out[1], adjusted(logits[1], **case), rtol=tolerance(1e-5), atol=tolerance(1e-5))
    assert np.array_equal(out[0], logits[0])


@pytest.mark.parametrize("name", CASES)
def test_rows_beside_bound_ones_stay_as_they_are_whatever_lies_with_their_seats(name):
    logits, bounds = random_logits(3), nobody(3)
    for seat in range(3):
        enter(bounds, seat, CASES[name], outputs=OUTPUT)
    bounds.binds[:] = [0, 1, 0]
    out = run(logits, bounds, [0, 1, 2], [[-1]] * 3)
    assert np.array_equal(out[[0, 2]], logits[[0, 2]])


def test_a_logit_of_minus_infinity_stays_one():
    logits, bounds = random_logits(1), nobody(1)
    logits[0, 5] = -np.inf
    enter(bounds, 0, CASES["all_penalties"], outputs=OUTPUT)
    out = run(logits, bounds, [0], [[5]])
    assert out[0, 5] == -np.inf and not np.isnan(out).any()


def test_what_ends_a_sequence_is_barred_below_a_length_only():
    case, logits, bounds = CASES["ending"], random_logits(1), nobody(1)
    enter(bounds, 0, case, as_ending=True)
    before, after = (run(logits, bounds, [0], [[-1]], position) for position in (9, 10))
    assert np.array_equal(before[0], adjusted(logits[0], **case)) and np.array_equal(after, logits)


def test_as_many_biases_as_a_request_may_have_are_added():
    assert MAX_LOGIT_BIAS > 300
    bounds, logits = nobody(1), random_logits(1)
    case: dict[str, Any] = {"biases": {token: float(token) for token in range(VOCAB)}}
    enter(bounds, 0, case)
    np.testing.assert_allclose(run(logits, bounds, [0], [[-1]])[0], adjusted(logits[0], **case), rtol=1e-6)


def test_bits_are_those_of_their_tokens():
    bits = jnp.asarray(np.stack([bits_of([0, 31, 32, 39]), bits_of([])]))
    assert np.flatnonzero(unpacked(bits, VOCAB)[0]).tolist() == [0, 31, 32, 39]
    assert not np.asarray(unpacked(bits, VOCAB))[1].any()


def count(bounds: Bounds, seats: Any, first: Any, tokens: Any) -> np.ndarray:
    tokens = np.asarray(tokens, np.int32)
    position = np.asarray(first)[:, None] + np.arange(tokens.shape[1])
    return np.asarray(jax.jit(counted)(bounds, np.asarray(seats, np.int32), position, tokens).counts)


def test_tokens_are_counted_in_their_seats_and_those_of_the_prompt_are_not():
    bounds = nobody(3)
    for seat in (0, 2):
        enter(bounds, seat, {"presence": 1.0}, outputs=[7])
    found = count(bounds, [2, 0, 3, -1], [3, 8, 8, 8], [[5, 6, 7, 7], [7, 9, -1, -1], [1, 1, 1, 1], [2, 2, 2, 2]])
    expected = np.zeros((3, VOCAB), int)
    expected[2, 7], expected[0, 7], expected[0, 9] = 3, 2, 1  # 5 and 6 were in the prompt
    assert np.array_equal(found, expected)


def test_seats_that_bind_nothing_count_nothing():
    assert not count(nobody(2), [0, 1], [9, 9], [[1], [2]]).any()


def test_counts_stay_at_the_most_that_they_can_say():
    bounds = nobody(1)
    enter(bounds, 0, {"presence": 1.0})
    bounds.counts[0, [3, 4]] = 65534, 65535
    found = count(bounds, [0], [9], [[3, 3, 3, 4]])
    assert found[0, [3, 4]].tolist() == [65535, 65535]


def test_a_row_of_a_seat_that_nobody_has_binds_nothing():
    bounds = nobody(2)
    enter(bounds, 1, {"presence": 1.0})
    assert jax.jit(of_rows)(bounds, np.asarray([2, -1, 1, 0])).binds.tolist() == [0, 0, 1, 0]

"""Biases, bans, allowed sets and penalties by seat, against the words that define them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.limits import MAX_LOGIT_BIAS
from jaxinfer.sampling.bounds import Bounds, adjust, counted, num_words, of_rows, unpacked
from tests.sampling.reference import adjusted
from tests.sampling.test_adjustments import CASES, OUTPUT, PROMPT, random_logits
from tests.tolerances import tolerance

VOCAB = 40  # no multiple of 32
CASES = {**CASES, "ending": {"biases": dict.fromkeys((4, 33, 39), -np.inf)}}
BANNED = -np.inf


def bits_of(tokens: Any) -> np.ndarray:
    flags = np.zeros(num_words(VOCAB) * 32, bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)


def nobody(num_seats: int) -> Bounds:
    arrays = {name: np.zeros(extent, dtype) for name, (extent, dtype) in Bounds.layout(num_seats, VOCAB).items()}
    arrays["allowed"][:] = bits_of(range(VOCAB))
    arrays["repetition_penalty"][:], arrays["bias_token"][:] = 1, VOCAB
    return Bounds(**arrays)


def enter(bounds: Bounds, seat: int, case: dict, *, outputs: list[int], as_ending: bool = False) -> None:
    """A case for a seat, as it is when `outputs` are counted."""
    biases = {token: bias for token, bias in case.get("biases", {}).items() if bias != BANNED}
    banned = {token for token, bias in case.get("biases", {}).items() if bias == BANNED}
    allowed = case.get("allowed")
    bounds.binds[seat] = 1
    if as_ending:
        bounds.ending[seat], bounds.min_length[seat], banned = bits_of(banned), 10, set()
    bounds.allowed[seat] = bits_of(set(range(VOCAB) if allowed is None else allowed) - banned)
    bounds.bias_token[seat, : len(biases)], bounds.bias[seat, : len(biases)] = list(biases), list(biases.values())
    bounds.in_prompt[seat] = bits_of(case.get("prompt", ())) if "repetition" in case else 0
    bounds.prompt_length[seat] = len(PROMPT)
    for token, count in Counter(outputs).items():
        bounds.counts[seat, token] = count
    for name in ("presence", "frequency", "repetition"):
        if name in case:
            getattr(bounds, f"{name}_penalty")[seat] = case[name]


def run(logits: np.ndarray, bounds: Bounds, seats: list[int], path: list[list[int]], position: int = 10) -> np.ndarray:
    def of_seats(logits: jax.Array, bounds: Bounds, seat: jax.Array, path: jax.Array) -> jax.Array:
        return adjust(logits, of_rows(bounds, seat), jnp.full(seat.shape, position), path)

    return np.asarray(jax.jit(of_seats)(logits, bounds, np.asarray(seats), np.asarray(path, np.int32)))


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


def test_what_ends_a_sequence_is_barred_below_a_length_only():
    case, logits, bounds = CASES["ending"], random_logits(1), nobody(1)
    enter(bounds, 0, case, outputs=[], as_ending=True)
    before, after = (run(logits, bounds, [0], [[-1]], position) for position in (9, 10))
    assert np.array_equal(before[0], adjusted(logits[0], **case)) and np.array_equal(after, logits)


def test_as_many_biases_as_a_request_may_have_are_added():
    assert MAX_LOGIT_BIAS > 300
    bounds, logits = nobody(1), random_logits(1)
    case: dict[str, Any] = {"biases": {token: float(token) for token in range(VOCAB)}}
    enter(bounds, 0, case, outputs=[])
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
    expected[2, 7], expected[0, 7], expected[0, 9] = 3, 2, 1  # 5 and 6 stood in the prompt
    assert np.array_equal(found, expected)


def test_seats_that_bind_nothing_count_nothing():
    assert not count(nobody(2), [0, 1], [9, 9], [[1], [2]]).any()


def test_counts_stay_at_the_most_that_they_can_say():
    bounds = nobody(1)
    enter(bounds, 0, {"presence": 1.0}, outputs=[])
    bounds.counts[0, [3, 4]] = 65534, 65535
    found = count(bounds, [0], [9], [[3, 3, 3, 4]])
    assert found[0, [3, 4]].tolist() == [65535, 65535]


def test_a_row_of_a_seat_that_nobody_has_binds_nothing():
    bounds = nobody(2)
    enter(bounds, 1, {"presence": 1.0}, outputs=[])
    assert jax.jit(of_rows)(bounds, np.asarray([2, -1, 1, 0])).binds.tolist() == [0, 0, 1, 0]

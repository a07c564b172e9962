"""Biases, bans, allowed sets and penalties on the device, against the words that define them."""

from collections import Counter

import jax
import numpy as np
import pytest

from jaxinfer.sampling.adjustments import ALLOWED, IN_PROMPT, Adjustments, adjust
from tests.sampling.reference import adjusted
from tests.tolerances import tolerance

VOCAB, ENTRIES = 40, 64
PROMPT, OUTPUT = [1, 2, 3, 3, 8], [3, 5, 5, 5, 9]

CASES = {
    "nothing": {},
    "presence": {"output": OUTPUT, "presence": 0.7},
    "negative_presence": {"output": OUTPUT, "presence": -1.3},
    "frequency": {"output": OUTPUT, "frequency": 0.4},
    "repetition": {"prompt": PROMPT, "output": OUTPUT, "repetition": 1.6},
    "repetition_below_one": {"prompt": PROMPT, "output": OUTPUT, "repetition": 0.5},
    "all_penalties": {"prompt": PROMPT, "output": OUTPUT, "presence": 0.3, "frequency": -0.9, "repetition": 1.2},
    "allowed": {"allowed": [5, 8, 30]},
    "biases": {"biases": {5: 2.0, 6: -100.0, 39: 0.5}},
    "bans": {"biases": {5: -np.inf, 0: -np.inf}},
    "biases_of_forbidden_tokens": {"allowed": [5, 8], "biases": {5: 2.0, 6: 100.0}},
    "penalties_after_biases": {"prompt": PROMPT, "output": OUTPUT, "biases": {5: 4.0, 9: -4.0}, "repetition": 2.0},
    "everything": {
        "prompt": PROMPT,
        "output": OUTPUT,
        "allowed": [1, 3, 5, 7, 9],
        "biases": {3: -np.inf, 7: 1.5, 9: -2.0},
        "presence": 0.5,
        "frequency": 0.25,
        "repetition": 1.3,
    },
}


def fill(adjustments: Adjustments, row: int, start: int, case: dict) -> int:
    """Enter a case for `row` from entry `start` on; the next free entry."""
    counts, biases, allowed = Counter(case.get("output", ())), case.get("biases", {}), case.get("allowed") or ()
    for token in sorted({*counts, *biases, *allowed, *case.get("prompt", ())}):
        marks = IN_PROMPT * (token in case.get("prompt", ())) + ALLOWED * (token in allowed)
        adjustments.row[start], adjustments.token[start] = row, token
        adjustments.bias[start], adjustments.state[start] = biases.get(token, 0.0), counts[token] + marks
        start += 1
    adjustments.restrict[row] = case.get("allowed") is not None
    for name in ("presence", "frequency", "repetition"):
        if name in case:
            getattr(adjustments, f"{name}_penalty")[row] = case[name]
    return start


def run(logits: np.ndarray, cases: list[dict]) -> np.ndarray:
    adjustments = Adjustments.empty(len(cases), ENTRIES)
    start = 0
    for row, case in enumerate(cases):
        start = fill(adjustments, row, start, case)
    return np.asarray(jax.jit(adjust)(logits, adjustments))


def random_logits(rows: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_adjusted_as_the_reference_says(name):
    logits = random_logits(3)
    out = run(logits, [{}, CASES[name], {}])
    np.testing.assert_allclose(out[1], adjusted(logits[1], **CASES[name]), rtol=tolerance(1e-5), atol=tolerance(1e-5))


@pytest.mark.parametrize("name", CASES)
def test_rows_without_adjustments_stay_as_they_are_bit_for_bit(name):
    logits = random_logits(3)
    out = run(logits, [{}, CASES[name], {}])
    assert np.array_equal(out[[0, 2]], logits[[0, 2]])


def test_each_row_has_adjustments_of_its_own():
    names = ["presence", "allowed", "all_penalties", "biases"]
    logits = random_logits(len(names))
    out = run(logits, [CASES[name] for name in names])
    for row, name in enumerate(names):
        np.testing.assert_allclose(
            out[row], adjusted(logits[row], **CASES[name]), rtol=tolerance(1e-5), atol=tolerance(1e-5)
        )


def test_a_logit_of_minus_infinity_stays_one():
    logits = random_logits(1)
    logits[0, 5] = -np.inf
    out = run(logits, [CASES["all_penalties"]])
    assert out[0, 5] == -np.inf and not np.isnan(out).any()

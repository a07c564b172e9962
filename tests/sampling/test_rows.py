"""A row's token is a function of its own logits, parameters, key and position: nothing else, bit for bit."""

import jax
import numpy as np
import pytest

from jaxinfer.sampling.sampler import sample
from tests.sampling.reference import Filters, sampling_batch

pytestmark = pytest.mark.optimized

sampler = jax.jit(sample)
VOCAB, ROWS = 700, 16
GREEDY = Filters(temperature=0.0)
# One row for each path: greedy, the whole vocabulary, candidates that suffice and candidates that do not.
KINDS = {
    "greedy": GREEDY,
    "everything": Filters(),
    "few_candidates": Filters(top_k=20, top_p=0.9),
    "many_candidates": Filters(temperature=2.0, top_k=300),
    "nucleus": Filters(temperature=1.5, top_p=0.95),
    "min_p": Filters(temperature=1.5, min_p=0.05),
}


def random_logits(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def draw(logits, rows, **options) -> np.ndarray:
    return np.asarray(sampler(logits, sampling_batch(rows, **options)))


@pytest.mark.parametrize("neighbours", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_draws_the_same_token_whatever_its_neighbours_do(kind, neighbours):
    keys = np.random.default_rng(1).integers(0, 2**32, (ROWS, 2), np.uint32)
    alike = draw(random_logits(), [KINDS[kind]] * ROWS, keys=keys)
    rows = [KINDS[kind] if row % 3 == 1 else KINDS[neighbours] for row in range(ROWS)]
    other = random_logits(seed=9)
    own = np.arange(ROWS) % 3 == 1
    other[own] = random_logits()[own]
    keys = np.where(own[:, None], keys, keys[::-1])
    assert np.array_equal(draw(other, rows, keys=keys)[own], alike[own])


def test_a_row_draws_the_same_token_wherever_it_stands_in_the_batch():
    rows = list(KINDS.values()) * 2
    keys = np.random.default_rng(1).integers(0, 2**32, (len(rows), 2), np.uint32)
    logits, positions = random_logits(len(rows)), np.arange(len(rows)) * 7
    moved = np.random.default_rng(2).permutation(len(rows))
    tokens = draw(logits, rows, keys=keys, positions=positions)
    shuffled = draw(logits[moved], [rows[i] for i in moved], keys=keys[moved], positions=positions[moved])
    assert np.array_equal(shuffled, tokens[moved])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_draws_the_same_token_in_batches_of_any_size(kind):
    logits, positions = random_logits(), 100 + np.arange(ROWS)
    together = draw(logits, [KINDS[kind]] * ROWS, positions=positions)
    for size in (1, 2):
        parts = [
            draw(logits[i : i + size], [KINDS[kind]] * size, positions=positions[i : i + size])
            for i in range(0, ROWS, size)
        ]
        assert np.array_equal(np.concatenate(parts), together)


def test_greedy_rows_draw_the_most_likely_token():
    logits = random_logits()
    rows = [GREEDY if row % 2 else Filters(temperature=5.0) for row in range(ROWS)]
    assert np.array_equal(draw(logits, rows)[1::2], logits[1::2].argmax(axis=-1))


def test_greedy_draws_the_lowest_id_among_equally_likely_tokens():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [650, 40, 512]] = 1.0
    assert np.all(draw(logits, [GREEDY] * ROWS) == 40)


def test_filters_do_not_change_a_greedy_row():
    logits = random_logits()
    filtered = Filters(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5)
    assert np.array_equal(draw(logits, [filtered] * ROWS), draw(logits, [GREEDY] * ROWS))


def test_the_same_key_and_position_draw_the_same_token_again():
    logits = random_logits()
    assert np.array_equal(draw(logits, [Filters()] * ROWS), draw(logits, [Filters()] * ROWS))


def test_rows_of_one_key_and_position_draw_the_same_token():
    logits = np.tile(random_logits(1), (ROWS, 1))
    tokens = draw(logits, [Filters(temperature=3.0)] * ROWS, positions=[5] * ROWS)
    assert len(set(tokens.tolist())) == 1


def test_other_positions_draw_other_tokens():
    logits = np.tile(random_logits(1), (ROWS, 1))
    assert len(set(draw(logits, [Filters(temperature=3.0)] * ROWS).tolist())) > ROWS // 2


@pytest.mark.parametrize("word", [0, 1])
def test_other_keys_draw_other_tokens(word):
    keys = np.full((ROWS, 2), 3)
    keys[:, word] = np.arange(ROWS)
    logits = np.tile(random_logits(1), (ROWS, 1))
    tokens = draw(logits, [Filters(temperature=3.0)] * ROWS, keys=keys, positions=[5] * ROWS)
    assert len(set(tokens.tolist())) > ROWS // 2


def test_no_row_makes_the_device_sort_the_vocabulary():
    logits, greedy = random_logits(), np.zeros(ROWS, np.int32)
    rows = sampling_batch([KINDS["few_candidates"]] * ROWS)
    text = jax.jit(sample).lower(logits, rows, greedy).compile().as_text()
    assert text is not None and "TopK" in text and " sort(" not in text

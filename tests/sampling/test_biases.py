"""Values added to single logits of single rows: banned tokens never appear, everything else stays as it was."""

import jax
import numpy as np
import pytest

from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.sampler import sample
from tests.sampling.bounds_cases import enter, nobody
from tests.sampling.checker import DRAWS, check_draws
from tests.sampling.reference import Filters, probabilities_of, sampling_batch

sampler = jax.jit(lambda logits, sampling, bounded: sample(bounded.hold(logits), sampling))
VOCAB = 50
BANNED = (3, 17, 49)
KINDS = {
    "greedy": Filters(temperature=0.0),
    "everything": Filters(temperature=2.0),
    "top_k": Filters(temperature=2.0, top_k=8),
    "top_p": Filters(temperature=2.0, top_p=0.9),
    "min_p": Filters(temperature=2.0, min_p=0.1),
}


def likely_banned() -> np.ndarray:
    logits = np.random.default_rng(0).normal(0, 1, VOCAB).astype(np.float32)
    logits[list(BANNED)] = 4.0
    return logits


BANS = dict.fromkeys(BANNED, -np.inf)


def draw(logits: np.ndarray, rows, biases: dict[int, float], only: int | None = None, repeat: int = 1) -> np.ndarray:
    """Tokens of rows that all have these biases, or `only` one of them."""
    count = repeat * len(rows)
    bounds = nobody(1, VOCAB)
    enter(bounds, 0, {"biases": biases})
    seats = np.zeros(count, int) if only is None else np.where(np.arange(count) == only, 0, 1)
    bounded = Bounded(bounds, seats, np.full(count, 5), np.full((count, 1), -1))  # type: ignore[arg-type]
    return np.asarray(sampler(np.tile(logits, (count, 1)), sampling_batch(rows, repeat=repeat), bounded))


@pytest.mark.parametrize("kind", KINDS)
def test_banned_tokens_never_appear_however_likely_they_are(kind):
    tokens = draw(likely_banned(), [KINDS[kind]], BANS, repeat=256)
    assert not set(tokens.tolist()) & set(BANNED)
    assert set(draw(likely_banned(), [KINDS[kind]], {}, repeat=256).tolist()) & set(BANNED)


def test_the_other_tokens_of_a_row_with_a_ban_keep_their_distribution():
    filters = Filters(temperature=1.4, top_k=12, top_p=0.9)
    tokens = draw(likely_banned(), [filters], BANS, repeat=DRAWS)
    allowed = likely_banned()
    allowed[list(BANNED)] = -np.inf
    check_draws(tokens, probabilities_of(allowed, filters))


def test_a_ban_in_one_row_leaves_the_others_alone():
    rows = list(KINDS.values())
    free = draw(likely_banned(), rows, {})
    banned = draw(likely_banned(), rows, BANS, only=2)
    others = np.arange(len(rows)) != 2
    assert np.array_equal(banned[others], free[others])


def test_a_finite_value_is_added_before_the_most_likely_token_is_chosen():
    logits = np.zeros(VOCAB, np.float32)
    logits[5] = 1.0
    assert draw(logits, [KINDS["greedy"]], {9: 1.5}).tolist() == [9]

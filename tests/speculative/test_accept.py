"""The tokens that a round lands, against the rules in plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.programs.seats import ENDED, Seats
from jaxinfer.speculative.accept import land, num_accepted

ROWS, WIDTH, SEATS = 300, 5, 310


def expected_accepted(drafts: list[int], count: int, sampled: list[int]) -> int:
    accepted = 0
    while accepted < count and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return accepted


@pytest.fixture(scope="module")
def case() -> dict[str, np.ndarray]:
    """Few words, so that drafts are accepted and sequences end at all places."""
    rng = np.random.default_rng(0)
    return {
        "drafts": rng.integers(0, 2, (ROWS, WIDTH - 1)).astype(np.int32),
        "count": rng.integers(0, WIDTH, ROWS).astype(np.int32),
        "sampled": rng.integers(0, 2, (ROWS, WIDTH)).astype(np.int32),
        "length": rng.integers(2, 50, ROWS).astype(np.int32),
        "room": rng.integers(1, 2 * WIDTH, ROWS).astype(np.int32),
        "ending": rng.integers(-1, 9, (ROWS, 2)).astype(np.int32),
        "runs": rng.random(ROWS) < 0.8,
    }


def test_drafts_are_accepted_up_to_the_first_that_was_not_sampled(case):
    got = num_accepted(jnp.asarray(case["drafts"]), jnp.asarray(case["count"]), jnp.asarray(case["sampled"]))
    expected = [
        expected_accepted(*row)
        for row in zip(case["drafts"].tolist(), case["count"].tolist(), case["sampled"].tolist(), strict=True)
    ]
    assert np.asarray(got).tolist() == expected
    assert set(expected) == set(range(WIDTH))


def test_tokens_land_up_to_the_one_behind_the_accepted_drafts_or_to_the_end(case):
    accepted = np.minimum(case["count"], np.arange(ROWS) % WIDTH).astype(np.int32)
    max_len = case["length"] + case["room"]
    seats, latest = Seats(*(jnp.full(SEATS, value, jnp.int32) for value in (99, 88, 7))), np.arange(ROWS) + 100
    seats, landed = land(
        seats, jnp.arange(ROWS), jnp.asarray(latest), jnp.asarray(case["length"]), jnp.asarray(case["runs"]),
        jnp.asarray(case["sampled"]), jnp.asarray(accepted),
        ending_token_ids=jnp.asarray(case["ending"]), max_len=jnp.asarray(max_len),
    )  # fmt: skip
    token, before, length = (np.asarray(of_all) for of_all in (seats.token, seats.before, seats.length))
    ways = set()
    for row in range(ROWS):
        if not case["runs"][row]:
            assert (np.asarray(landed)[row] == -1).all() and (token[row], before[row], length[row]) == (99, 88, 7)
            continue
        tokens, ended = [], False
        for sampled in case["sampled"][row, : accepted[row] + 1].tolist():
            tokens.append(sampled)
            if sampled in case["ending"][row] or case["length"][row] + len(tokens) >= max_len[row]:
                ended = True
                break
        assert np.asarray(landed)[row].tolist() == tokens + [-1] * (WIDTH - len(tokens))
        assert (token[row], length[row]) == (ENDED if ended else tokens[-1], case["length"][row] + len(tokens))
        assert before[row] == [latest[row], *tokens][-2]
        ways.add((ended, len(tokens)))
    assert len(ways) == 2 * WIDTH, "some way of landing was not tried"
    assert (token[ROWS:] == 99).all() and (length[ROWS:] == 7).all()

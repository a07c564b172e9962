"""What launches of so many rounds take, learned from a few, and how many rounds that makes of the next."""

import pytest

from jaxinfer.engine.pace import Pace


def pace_of(launch: float, each: float, rounds=(1, 4, 2, 8), times: int = 3) -> Pace:
    """Of an engine whose launches take so many seconds, and each round so many more."""
    pace = Pace()
    for number in rounds * times:
        pace.note("kind", number, launch + each * number)
    return pace


@pytest.mark.parametrize(("launch", "each", "expected"), [(0.0, 0.01, 5), (0.02, 0.01, 3), (0.04, 0.02, 1), (0, 1, 1)])
def test_rounds_fit_into_the_time_that_there_is(launch, each, expected):
    assert pace_of(launch, each).within("kind", 0.0501) == expected


def test_launches_of_one_length_are_taken_to_cost_their_rounds():
    assert pace_of(0.005, 0.005, rounds=(1,)).within("kind", 0.0501) == 5


def test_of_what_is_not_known_a_launch_has_one_round():
    pace = pace_of(0.0, 0.001)
    assert pace.within("other", 1.0) == 1
    assert pace.beside_one_round("other", 8, num_rows=7, num_of_one_round=1) == 1


def test_what_was_long_ago_is_forgotten():
    pace = pace_of(0.0, 0.04)
    for _ in range(200):
        pace.note("kind", 1, 0.005)
    assert pace.within("kind", 0.0525) == 10


@pytest.mark.parametrize(
    ("launch", "each", "num_rows", "num_of_one_round", "expected"),
    [
        (0.0, 0.01, 7, 1, 1),  # one round is as good as many
        (0.01, 0.01, 7, 1, 3),  # 0.04 s for 0.02
        (0.03, 0.01, 7, 1, 5),
        (0.03, 0.01, 1, 7, 1),  # most rows would wait for one
        (0.3, 0.01, 7, 1, 16),  # no more than there may be
        (0.01, 0.01, 0, 8, 1),
    ],
)
def test_rows_of_one_round_wait_twice_as_long_at_most(launch, each, num_rows, num_of_one_round, expected):
    pace = pace_of(launch, each)
    found = pace.beside_one_round("kind", 16, num_rows=num_rows, num_of_one_round=num_of_one_round)
    assert found == expected


def test_seconds_that_fall_with_rounds_are_no_negative_ones():
    pace = Pace()
    for rounds, seconds in ((1, 0.2), (8, 0.1)) * 5:
        pace.note("kind", rounds, seconds)
    assert pace.within("kind", 0.05) == 1
    assert 1 <= pace.beside_one_round("kind", 8, num_rows=3, num_of_one_round=1) <= 8

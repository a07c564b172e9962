"""More sequences at once are let in where they bring more tokens a second, and only there."""

import pytest

from jaxinfer.engine.batch_costs import BatchCosts


def costs_of(*seconds: tuple[int, float], lanes: bool = False) -> BatchCosts:
    costs = BatchCosts()
    for size, value in seconds:
        costs.observe(size, value, lanes=lanes)
    return costs


@pytest.mark.parametrize(
    ("running", "more", "pays"),
    [
        (1, 1, True),  # 2 in 1.2 ms against 1 in 1 ms
        (4, 1, False),  # 5 in 4 ms against 4 in 1.5 ms
        (4, 6, False),  # 10 in 4 ms: still fewer than 4 in 1.5
        (4, 12, True),  # 16 in 4 ms: more
        (16, 1, True),  # nobody has seen 17
    ],
)
def test_one_more_pays_if_some_number_of_them_does(running, more, pays):
    costs = costs_of((1, 1e-3), (2, 1.2e-3), (4, 1.5e-3), (16, 4e-3 * 1.04))
    assert costs.pays(running, more, lanes=False) is pays


def test_lanes_and_rows_are_told_apart():
    costs = costs_of((4, 1.0), (16, 100.0))
    assert not costs.pays(4, 12, lanes=False)
    assert costs.pays(4, 12, lanes=True)


def test_costs_follow_what_is_seen_and_one_slow_launch_does_not_count_for_much():
    costs = costs_of((4, 1.0), (16, 10.0))
    costs.observe(4, 1000.0, lanes=False)
    assert not costs.pays(4, 12, lanes=False)
    for _ in range(20):
        costs.observe(16, 2.0, lanes=False)
    assert costs.pays(4, 12, lanes=False)

"""Longrope: sequences that outgrow their original length start over, once, whatever else happens to them."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.turning import begin_short, turns
from tests.branching.builders import make_group
from tests.branching.lane_device import GroupSimulation
from tests.builders import make_request
from tests.engine.fake_device import Simulation, expected_output

LENGTH = 24  # the original one


def run(simulation: Simulation, steps: int = 3000) -> None:
    for _ in range(steps):
        if not simulation.scheduler.has_unfinished_requests():
            return
        simulation.step()
        simulation.scheduler.check_integrity()
    raise AssertionError(f"requests are unfinished after {steps} steps")


def prompt(length: int) -> list[int]:
    return list(range(length))


def test_a_request_that_outgrows_the_length_starts_over_once_and_keeps_its_tokens():
    simulation = Simulation(budget=32)
    request = make_request("a", prompt(20), max_tokens=40)
    simulation.add(request)
    begin_short(request, LENGTH)
    assert (request.max_total_tokens, request.later_total_tokens) == (LENGTH + 1, 60)
    run(simulation)
    assert request.output_token_ids == expected_output(prompt(20), 40)
    assert (request.rope_length, request.later_total_tokens) == (LENGTH + 1, 0)
    assert request.status is RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize(
    ("length", "max_tokens", "rope_length", "later"),
    [(20, 5, 0, 0), (20, 6, 0, 26), (24, 9, 0, 33), (25, 9, LENGTH + 1, 0)],
)
def test_only_requests_that_cross_the_length_turn(length, max_tokens, rope_length, later):
    request = make_request("a", prompt(length), max_tokens=max_tokens)
    begin_short(request, LENGTH)
    assert (request.rope_length, request.later_total_tokens) == (rope_length, later)


def test_a_request_that_ends_with_the_first_token_beyond_the_length_does_not_turn():
    expected = expected_output(prompt(20), 10)
    simulation = Simulation(budget=32)
    request = make_request("a", prompt(20), max_tokens=40, eos_token_ids=[expected[4]])
    simulation.add(request)
    begin_short(request, LENGTH)
    run(simulation)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.output_token_ids == expected[:5] and request.num_tokens == LENGTH + 1
    assert not turns(request)


@pytest.mark.parametrize("mode", ["in_one_sequence", "batching"])
@pytest.mark.parametrize("budget", [8, 16, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_members_that_have_turned_let_go_of_their_trunk_in_a_small_pool(mode, budget, caching):
    """A pool that holds one member, but not with the trunk beside it: it would preempt itself for ever."""
    simulation = GroupSimulation(num_pages=12, budget=budget, caching=caching, rows=4)
    group = make_group("a", prompt(16), [[1000], [1001]], max_tokens=30, branch_mode=mode)
    for member in group.members:
        begin_short(member, 20)
    simulation.add_group(group)
    run(simulation)
    for member in group.members:
        assert member.output_token_ids == expected_output(member.prompt_token_ids, 30)
        assert member.rope_length == 21

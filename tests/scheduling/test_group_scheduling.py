"""Which members of a group run when, and what becomes of its trunk."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import Rounds, RowKind
from tests.branching.builders import make_group
from tests.branching.lane_device import GroupSimulation
from tests.builders import make_request
from tests.engine.fake_device import expected_output

ABORTED = RequestStatus.FINISHED_ABORTED


def group_of(count: int = 4, *, name: str = "a", length: int = 9, first: int = 0, **options) -> RequestGroup:
    """Members with a token of their own each, after `length` shared ones."""
    suffixes = [[1000 + i] for i in range(count)]
    return make_group(name, list(range(first, first + length)), suffixes, **{"max_tokens": 8, **options})


def check_tokens(*groups: RequestGroup) -> None:
    for member in (member for group in groups for member in group.members):
        if member.status is RequestStatus.FINISHED_LENGTH:
            most = member.sampling_params.max_tokens or 0
            assert member.output_token_ids == expected_output(member.prompt_token_ids, most)


def test_a_member_that_is_aborted_before_it_ran_makes_no_room():
    sim = GroupSimulation()
    group = sim.add_group(group_of(4, max_parallel=1))
    sim.step()
    sim.end([group.members[2]], ABORTED)
    sim.step()
    assert group.num_running == 1 and [m.branch for m in group.pending] == [1, 3]
    sim.drain()
    check_tokens(group)


def test_a_member_that_is_aborted_while_it_runs_makes_room_for_the_next():
    sim = GroupSimulation()
    group = sim.add_group(group_of(4, max_parallel=2))
    sim.step()
    sim.end([group.members[0], group.members[2]], ABORTED)
    sim.step()
    assert [m.branch for m in group.members if m.pages] == [1, 3] and not group.pending
    sim.drain()
    check_tokens(group)


def test_the_longest_members_begin():
    sim = GroupSimulation()
    group = sim.add_group(group_of(4, max_parallel=2, predicted=[3, 9, 1, 5]))
    sim.step()
    assert [m.branch for m in group.members if m.pages] == [1, 3]
    assert [m.branch for m in group.pending] == [0, 2]


def test_members_that_decode_one_by_one_stand_beside_those_of_lanes():
    """Rows of their own have their trunk's pages in front of theirs; lanes have it once."""
    sim = GroupSimulation(rows=6, budget=40, rounds=Rounds(RowKind.DECODE, most=4))
    lanes, rows = group_of(3), group_of(3, name="b", first=50, branch_mode="batching")
    sim.add_group(lanes)
    sim.add_group(rows)
    sim.drain()
    assert sim.device.lanes_read and set(sim.device.lanes_read) == {3}
    check_tokens(lanes, rows)


@pytest.mark.parametrize("mode", ["in_one_sequence", "batching"])
def test_a_trunk_that_loses_its_place_in_the_launch_that_would_complete_it_is_computed_again(mode):
    """A request of higher priority that came after it takes its pages."""
    sim = GroupSimulation(num_pages=7, budget=16, policy="priority", max_len=28)
    group = sim.add_group(group_of(2, length=21, priority=2, branch_mode=mode, max_tokens=4))
    sim.launch()
    trunk = group.trunk
    assert trunk is not None and (trunk.num_computed_tokens, trunk.is_computed) == (16, False)
    urgent = sim.add(make_request("urgent", range(500, 508), max_tokens=12))
    preempted = set()
    for _ in range(200):
        if not sim.scheduler.has_unfinished_requests():
            break
        preempted |= sim.step().preempted_req_ids
    assert all(request.is_finished for request in (*group.members, urgent))
    assert urgent.output_token_ids == expected_output(urgent.prompt_token_ids, 12)
    check_tokens(group)


def test_groups_that_take_each_others_idle_trunks_all_come_to_an_end():
    sim = GroupSimulation(num_pages=8, max_len=32, rows=2, budget=8)
    groups = [group_of(5, name=str(n), first=100 * n, length=13, max_parallel=1) for n in range(3)]
    for group in groups:
        sim.add_group(group)
    sim.drain(max_steps=1000)
    check_tokens(*groups)
    assert all(member.is_finished for group in groups for member in group.members)


def test_of_a_group_that_is_aborted_while_its_trunk_is_computed_nothing_is_left():
    sim = GroupSimulation(budget=8)
    group = sim.add_group(group_of(3, length=21))
    sim.launch()
    sim.end(group.members, ABORTED)
    assert sim.scheduler.kv.allocator.num_held == 0 and not sim.scheduler.has_unfinished_requests()
    other = sim.add(make_request("other", range(300, 340), max_tokens=5))
    sim.drain()
    assert other.output_token_ids == expected_output(other.prompt_token_ids, 5)
    assert not sim.device.batch.seat_of.keys() - {"other"}

"""Bugs planted on the host are found by random lives of groups; those in what a device reads, by an engine as well."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jaxinfer.branching.branch_state import BranchLanes
from jaxinfer.engine import input_batch
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.request import RequestStatus
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.trunks import Trunks
from tests.branching.builders import alone, make_group, run_groups
from tests.builders import random_prompts, run_requests
from tests.scheduling.test_branch_states import BranchLife


def given_up_while_members_run(give_up_idle):
    def planted(self, wanted):
        for trunk in self.held:
            if trunk is not wanted.trunk:
                self.release(trunk)
                return True
        return False

    return planted


def borrowed_pages_are_given_back(held):
    def planted(self, request):
        return request.pages[request.num_published_tokens // self.page_size :]

    return planted


def free_once_computed(keep):
    def planted(self, trunk):
        keep(self, trunk)
        self._kv.allocator.free(trunk.pages)

    return planted


def nobody_takes_the_place(member_ended):
    def planted(self, group):
        pending, group.pending = group.pending, deque()
        member_ended(self, group)
        group.pending = pending

    return planted


def pending_members_had_a_place(member_ended):
    def planted(self, group):
        pending, group.pending = group.pending, deque()
        member_ended(self, group)
        group.pending = pending
        if pending:
            self.waiting.add(pending.popleft(), first=True)

    return planted


def trunk_outlives_its_members(member_ended):
    def planted(self, group):
        trunk, group.trunk = group.trunk, None
        member_ended(self, group)
        group.trunk = trunk

    return planted


def preempted_members_count(count_running):
    def planted(self, request, change):
        count_running(self, request, change)
        if request.group is not None and request.status is RequestStatus.PREEMPTED and change < 0:
            request.group.num_running += 1

    return planted


def given_up_but_computed(release):
    def planted(self, trunk):
        release(self, trunk)
        trunk.is_computed = True

    return planted


def computed_with_its_first_chunk(add):
    def planted(self, request, count, known, new_pages):
        add(self, request, count, known, new_pages)
        request.is_computed = request.is_trunk

    return planted


def keeps_its_seat(leave_seat):
    def planted(self, trunk):
        leave_seat(self, trunk)
        self.finished_req_ids.discard(trunk.request_id)

    return planted


def a_page_of_the_next_branch(lanes):
    def planted(self, trunk, members, max_pages, *more):
        def with_wrong_owner(lane):
            owners = list(lane.owners)
            if len(lane.branches) > 1:
                owners[lane.first_own[lane.branches[1]] - 1] = lane.branches[1]
            return replace(lane, owners=owners)

        return [with_wrong_owner(lane) for lane in lanes(self, trunk, members, max_pages, *more)]

    return planted


def lanes_of_any_length(lanes):
    def planted(self, trunk, members, max_pages, *more):
        return lanes(self, trunk, members, None, *more)

    return planted


def one_page_too_late(fill_lanes):
    def planted(packed, lanes, requests, first_pages, page_size):
        places = fill_lanes(packed, lanes, requests, first_pages, page_size)
        packed["first_page"][places] += 1
        return places

    return planted


def in_another_order(lanes_of):
    def planted(requests, max_pages, *more):
        return [(lane, indices[::-1]) for lane, indices in lanes_of(requests, max_pages, *more)]

    return planted


def behind_a_trunk_that_is_their_own(fill_lanes):
    def planted(packed, lanes, requests, first_pages, page_size):
        places = fill_lanes(packed, lanes, requests, first_pages, page_size)
        for request, place in zip(requests, places, strict=True):
            if request.trunk is not None and not request.shares_lane:
                packed["lane_page"][place] -= request.trunk.num_tokens // page_size
        return places

    return planted


PLANTED = {
    "a trunk is given up while its members run": (Trunks, "give_up_idle", given_up_while_members_run),
    "a member gives back the trunk's pages": (KVCacheManager, "_held", borrowed_pages_are_given_back),
    "a trunk's pages are handed out twice": (Trunks, "keep", free_once_computed),
    "the place of a member that ended stays empty": (Scheduler, "_member_ended", nobody_takes_the_place),
    "a pending member that is aborted makes room": (Scheduler, "_member_ended", pending_members_had_a_place),
    "a trunk outlives its members": (Scheduler, "_member_ended", trunk_outlives_its_members),
    "preempted members count as running": (Scheduler, "_count_running", preempted_members_count),
    "a trunk that was given up counts as computed": (Trunks, "release", given_up_but_computed),
    "a trunk counts as computed with its first chunk": (LaunchPlan, "add", computed_with_its_first_chunk),
    "a computed trunk keeps its seat": (Scheduler, "_leave_seat", keeps_its_seat),
    "a page has the wrong owner": (BranchLanes, "_in_one_sequence", a_page_of_the_next_branch),
    "a lane is longer than a launch can read": (BranchLanes, "_in_one_sequence", lanes_of_any_length),
    "pages that may be written begin one too late": (input_batch, "fill_lanes", one_page_too_late),
    "sequences of a lane are in another order": (input_batch, "lanes_of", in_another_order),
    "members in batching mode beside lanes begin too early": (
        input_batch, "fill_lanes", behind_a_trunk_that_is_their_own,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug):
    where, name, plant = PLANTED[bug]
    # Examples are not made smaller: that one is found is enough.
    few = settings(max_examples=1000, stateful_step_count=40, phases=[Phase.generate], report_multiple_bugs=False)
    with mock.patch.object(where, name, plant(getattr(where, name))), pytest.raises(Exception) as found:
        run_state_machine_as_test(BranchLife, settings=few)
    assert not isinstance(found.value, TypeError | AttributeError | NameError), "the planted piece itself is broken"


OF_LANES = [bug for bug, (where, name, _) in PLANTED.items() if where is input_batch or name == "_in_one_sequence"]


@pytest.mark.parametrize("bug", [None, *(bug for bug in OF_LANES if "longer" not in bug)])
def test_the_tokens_of_an_engine_show_bugs_of_lanes(bug, idle_engine):
    """Members of a group in lanes, and of one in batching mode beside them, that have several pages of their own."""
    core = idle_engine()
    [prefix], suffixes = random_prompts([41]), random_prompts([6, 3], seed=1)
    modes = {"a": "in_one_sequence", "b": "batching"}
    same = [request for group in modes for request in alone(group, prefix, suffixes, max_tokens=20)]
    expected = run_requests(core, same)
    where, name, plant = PLANTED[bug] if bug else (input_batch, "lanes_of", lambda found: found)
    with mock.patch.object(where, name, plant(getattr(where, name))):
        groups = [make_group(group, prefix, suffixes, branch_mode=mode, max_tokens=20) for group, mode in modes.items()]
        got = run_groups(core, groups)
    # What was written to wrong pages may be cached.
    assert core.reset_prefix_cache()
    assert (got == expected) == (bug is None)

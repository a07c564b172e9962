"""What a group holds of the pool while it runs: its trunk once, and for each branch its own tokens."""

from __future__ import annotations

import pytest

from jaxinfer.limits import BRANCH_MODES
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import Rounds, RowKind
from tests.branching.builders import make_group
from tests.branching.lane_device import GroupSimulation
from tests.engine.fake_device import expected_output

PAGE_SIZE = 4
PREFIX = list(range(41))
SUFFIXES = [[1000 + 10 * i + j for j in range(i)] for i in range(6)]


def group_of(mode: str, **options) -> RequestGroup:
    each = [{"max_tokens": 6 + 7 * i} for i in range(len(SUFFIXES))]
    return make_group("a", PREFIX, SUFFIXES, page_size=PAGE_SIZE, branch_mode=mode, each=each, **options)


def own_tokens_in_pages(group: RequestGroup) -> int:
    """Tokens after the trunk that running members may have computed."""
    assert group.trunk is not None
    return sum(m.num_known_tokens - group.trunk.num_tokens for m in group.members if m.pages)


def run(group: RequestGroup, sim: GroupSimulation) -> list[tuple[int, int, int]]:
    """After each launch: pages held, tokens after the trunk of running members, and how many these are."""
    found = []
    sim.add_group(group)
    while sim.scheduler.has_unfinished_requests():
        sim.launch()
        running = sum(bool(member.pages) for member in group.members)
        found.append((sim.scheduler.kv.allocator.num_held, own_tokens_in_pages(group), running))
        sim.land()
    for member in group.members:
        most = member.sampling_params.max_tokens
        assert member.output_token_ids == expected_output(member.prompt_token_ids, most or 0)
    return found


@pytest.mark.parametrize("rounds", [Rounds(), Rounds(RowKind.DECODE, most=4)], ids=["steps", "loops"])
@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_the_trunk_is_held_once_and_each_branch_holds_its_tokens_within_a_page(mode, rounds):
    group = group_of(mode)
    found = run(group, GroupSimulation(rows=6, budget=64, rounds=rounds))
    trunk_pages = len(PREFIX) // PAGE_SIZE
    assert max(running for *_, running in found) == 6
    for held, own, running in found:
        if running:
            assert held * PAGE_SIZE <= trunk_pages * PAGE_SIZE + own + running * PAGE_SIZE
            assert held - trunk_pages >= -(-(own - running) // PAGE_SIZE)  # no token is without its slot


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_branches_find_the_trunk_in_the_cache_and_hold_no_copy_of_it(mode):
    sim = GroupSimulation(rows=6, budget=64, caching=True)
    group = group_of(mode)
    sim.add_group(group)
    assert group.trunk is not None
    trunk_pages = len(PREFIX) // PAGE_SIZE
    while sim.scheduler.has_unfinished_requests():
        sim.launch()
        running = [member for member in group.members if member.pages]
        assert all(member.pages[:trunk_pages] == group.trunk.pages for member in running)
        held = sim.scheduler.kv.allocator.num_pages - sim.scheduler.kv.num_available
        assert held * PAGE_SIZE <= trunk_pages * PAGE_SIZE + own_tokens_in_pages(group) + len(running) * PAGE_SIZE
        sim.land()


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_pages_of_a_finished_branch_are_used_by_others_of_its_group(mode):
    """In a pool that has room for no more than two branches at a time, without a preemption."""
    longest = -(-(len(PREFIX) + len(SUFFIXES[-1]) + 6 + 7 * 5) // PAGE_SIZE)
    num_pages = longest + (longest - len(PREFIX) // PAGE_SIZE)
    sim = GroupSimulation(rows=6, budget=64, num_pages=num_pages)
    group = group_of(mode, max_parallel=2)
    sim.add_group(group)
    users: dict[int, set[int]] = {}
    while sim.scheduler.has_unfinished_requests():
        sim.launch()
        for member in group.members:
            for page in member.pages[member.num_borrowed_pages :]:
                users.setdefault(page, set()).add(member.branch)
        sim.land()
    assert sim.scheduler.num_preemptions == 0
    assert max(map(len, users.values())) > 2, "no page came into other hands"
    assert len(users) <= num_pages - len(PREFIX) // PAGE_SIZE

"""The state of branches (page tables, positions, tips and lanes) against what each sequence has alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.branching.bim import EMPTY, TRUNK, bim_mask, draw_bim
from jaxinfer.branching.branch_state import BranchLanes, Lane
from jaxinfer.limits import BRANCH_MODES
from kernels_pallas.visibility import visible

PAGE_SIZE = 4


@dataclass
class Sequence:
    """A sequence whose pages are where a test wants them."""

    token_ids: list[int]
    pages: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0


def branches_of(
    mode: str, lengths: list[int], *, trunk_pages: int = 2, page_size: int = PAGE_SIZE, seed: int = 0
) -> BranchLanes:
    """A trunk and branches with so many tokens of their own, in pages of any order. Tokens of branch i are 100 * i
    upwards."""
    ids = iter(np.random.default_rng(seed).permutation(1000).tolist())
    manager = BranchLanes(page_size, mode)
    shared: list[int] = []
    trunk = Sequence(list(range(-1, -1 - trunk_pages * page_size, -1)), [next(ids) for _ in range(trunk_pages)])
    if trunk_pages:
        manager.init_prefix(trunk)
        shared = trunk.pages
    for branch, length in enumerate(lengths):
        own = [next(ids) for _ in range(-(-length // page_size))]
        tokens = [*trunk.token_ids, *range(100 * branch, 100 * branch + length)]
        manager.add_branch(branch, Sequence(tokens, [*shared, *own], len(trunk.token_ids) + 1))
    return manager


def own_pages(manager: BranchLanes, branch: int) -> list[int]:
    return list(manager.sequences[branch].pages[manager.trunk_len // manager.page_size :])


def slots_alone(manager: BranchLanes, branch: int) -> list[int]:
    """The slots of a sequence's tokens, by its own table of pages."""
    sequence, size = manager.sequences[branch], manager.page_size
    return [sequence.pages[p // size] * size + p % size for p in range(len(sequence.token_ids))]


def slots_seen(manager: BranchLanes, lane: Lane, branch: int, limit: int) -> list[int]:
    """The slots that a token sees by the engine's rule, in the order of the lane."""
    size = manager.page_size
    index = np.arange(len(lane.pages) * size, dtype=np.int32)
    seen = np.asarray(
        visible(
            index,
            limit=np.int32(limit),
            branch=np.int32(branch),
            tail_bits=np.zeros((1, 0), np.uint32),
            trunk_len=np.int32(lane.trunk_pages * size),
            tail_start=np.int32(len(index)),
            index_branch=np.repeat(np.asarray(lane.owners, np.int32), size),
        )
    ).reshape(-1)
    return [lane.pages[i // size] * size + i % size for i in np.flatnonzero(seen).tolist()]


def test_tips_are_at_the_depth_of_each_branch_and_outputs_behind_its_prompt():
    manager = branches_of("in_one_sequence", [3, 5, 1])
    assert manager.trunk_len == 8
    assert manager.get_tip_positions() == {0: 10, 1: 12, 2: 8}
    assert manager.branch_outputs == {0: [1, 2], 1: [101, 102, 103, 104], 2: []}


def test_one_lane_has_the_trunk_once_and_the_own_pages_of_all_branches_behind_each_other():
    manager = branches_of("in_one_sequence", [3, 5, 1])
    trunk, own = manager.trunk, [own_pages(manager, branch) for branch in range(3)]
    assert trunk is not None
    (lane,) = manager.lanes()
    assert lane.pages == [*trunk.pages, *own[0], *own[1], *own[2]]
    assert lane.owners == [TRUNK, TRUNK, 0, 1, 1, 2]
    assert (lane.trunk_pages, lane.branches, lane.first_own) == (2, (0, 1, 2), {0: 2, 1: 3, 2: 5})
    assert manager.get_branch_tip_indices() == {0: (0, 10), 1: (0, 16), 2: (0, 20)}


def test_in_batching_mode_each_branch_has_a_lane_that_is_its_own_table():
    manager = branches_of("batching", [3, 5])
    lanes = manager.lanes()
    assert [lane.pages for lane in lanes] == [manager.sequences[branch].pages for branch in range(2)]
    assert [set(lane.owners) for lane in lanes] == [{TRUNK}] * 2
    assert manager.get_branch_tip_indices() == {0: (0, 10), 1: (1, 12)}


@pytest.mark.parametrize(("max_pages", "expected"), [(5, [(0, 1), (2, 3)]), (7, [(0, 1, 2, 3)]), (3, [(0,), (1,)])])
def test_branches_that_do_not_fit_into_a_lane_stand_in_several_that_all_begin_with_the_trunk(max_pages, expected):
    manager = branches_of("in_one_sequence", [4, 5, 8, 1][: 4 if max_pages > 3 else 2], trunk_pages=1)
    lanes = manager.lanes(max_pages=max_pages)
    assert [lane.branches for lane in lanes] == expected
    assert manager.trunk is not None and all(lane.pages[:1] == manager.trunk.pages for lane in lanes)
    fitting = [lane for lane in lanes if len(lane.branches) > 1]
    assert all(len(lane.pages) == len(lane.owners) <= max_pages for lane in fitting)


def test_no_lane_is_longer_than_it_may_be_unless_one_branch_alone_is():
    manager = branches_of("in_one_sequence", [3, 40, 3, 3], trunk_pages=2)
    assert [len(lane.pages) for lane in manager.lanes(max_pages=5)] == [3, 12, 4]


def test_a_branch_whose_beginning_lies_in_other_pages_has_a_lane_of_its_own():
    manager = branches_of("in_one_sequence", [3, 5, 1])
    other = manager.sequences[1]
    other.pages[:2] = [2000, 2001]  # type: ignore[index]
    lanes = manager.lanes()
    assert [lane.branches for lane in lanes] == [(0, 2), (1,)]
    assert lanes[1].pages == other.pages and lanes[1].owners == [TRUNK, TRUNK, 1, 1]


def test_lanes_close_up_behind_a_branch_that_is_finished_and_keep_their_order():
    manager = branches_of("in_one_sequence", [3, 5, 1, 9])
    (before,) = manager.lanes()
    expected = own_pages(manager, 1)
    assert manager.finish(1) == expected == before.pages[3:5]
    (lane,) = manager.lanes()
    assert lane.pages == [page for page in before.pages if page not in expected]
    assert lane.owners == [TRUNK, TRUNK, 0, 2, 3, 3, 3]
    assert manager.get_branch_tip_indices() == {0: (0, 10), 2: (0, 12), 3: (0, 24)}
    assert manager.active_branches == [0, 2, 3] and 1 not in manager.branch_outputs


def test_branches_without_pages_are_in_no_lane_until_they_run():
    manager = branches_of("in_one_sequence", [3, 5])
    pages = list(manager.sequences[0].pages)
    manager.sequences[0].pages.clear()  # type: ignore[attr-defined]
    assert manager.active_branches == [1] and [lane.branches for lane in manager.lanes()] == [(1,)]
    manager.sequences[0].pages.extend(pages)  # type: ignore[attr-defined]
    assert [lane.branches for lane in manager.lanes()] == [(0, 1)]


def test_chosen_branches_stand_in_the_order_in_which_they_are_named():
    manager = branches_of("in_one_sequence", [3, 5, 1])
    (lane,) = manager.lanes([2, 0])
    assert lane.branches == (2, 0) and lane.owners == [TRUNK, TRUNK, 2, 0]


@given(
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=6),
    trunk_pages=st.integers(0, 4),
    page_size=st.sampled_from([1, 4, 8]),
    mode=st.sampled_from(BRANCH_MODES),
    ended=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 1000),
)
def test_a_decode_step_computes_for_each_branch_what_its_sequence_alone_computes(
    lengths, trunk_pages, page_size, mode, ended, seed
):
    manager = branches_of(mode, lengths, trunk_pages=trunk_pages, page_size=page_size, seed=seed)
    for branch in ended & set(range(len(lengths))):
        manager.finish(branch)
    inputs = manager.prepare_decode_inputs()
    tips = manager.get_branch_tip_indices()
    order = [branch for lane in inputs.lanes for branch in lane.branches]
    assert sorted(order) == sorted(manager.sequences) == sorted(tips)
    for i, branch in enumerate(order):
        sequence, lane = manager.sequences[branch], inputs.lanes[inputs.row[i]]
        alone = slots_alone(manager, branch)
        assert inputs.token_ids[i] == sequence.token_ids[-1]
        assert inputs.positions[i] == len(sequence.token_ids) - 1
        assert inputs.slot_mapping[i] == alone[-1]
        assert tips[branch] == (inputs.row[i], inputs.limit[i])
        seen = slots_seen(manager, lane, int(inputs.branch[i]), int(inputs.limit[i]))
        assert seen == alone
        of_map = bim_mask(manager.bim(lane), inputs.branch[i : i + 1], inputs.limit[i : i + 1])[0]
        assert [lane.pages[x // page_size] * page_size + x % page_size for x in np.flatnonzero(of_map)] == alone


def test_the_map_of_a_lane_says_whose_every_slot_is():
    manager = branches_of("in_one_sequence", [3, 5], trunk_pages=1)
    (lane,) = manager.lanes()
    assert manager.bim(lane).tolist() == [TRUNK] * 4 + [0] * 3 + [EMPTY] + [1] * 5 + [EMPTY] * 3
    assert draw_bim(manager.bim(lane), PAGE_SIZE).splitlines()[1] == "page 1  000.  branch 0 x3, empty x1"
    alone = branches_of("batching", [3, 5], trunk_pages=1)
    assert [alone.bim(one).tolist() for one in alone.lanes()] == [
        [TRUNK] * 7 + [EMPTY], [TRUNK] * 9 + [EMPTY] * 3,
    ]  # fmt: skip


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="branch_mode must be one of in_one_sequence, batching, got 'both'"):
        BranchLanes(PAGE_SIZE, "both")
    manager = branches_of("batching", [3], trunk_pages=1)
    with pytest.raises(ValueError, match="the trunk is said before the first branch"):
        manager.init_prefix(Sequence([1] * 4))
    with pytest.raises(ValueError, match="whole pages of 4 tokens, got 6 tokens"):
        BranchLanes(PAGE_SIZE, "batching").init_prefix(Sequence([1] * 6))
    for branch, tokens, message in (
        (0, [-1, -2, -3, -4, 5], "branch 0 is there already"),
        (-1, [-1, -2, -3, -4, 5], "branch -1 is negative"),
        (1, [-1, -2, 3, -4, 5], "branch 1 does not begin with the trunk"),
        (1, [-1, -2, -3], "branch 1 does not begin with the trunk"),
        (1, [-1, -2, -3, -4], "branch 1 has no token of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.add_branch(branch, Sequence(tokens))

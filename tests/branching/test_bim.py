"""The Branch Index Map slot by slot: its entries, its mask against the engine's rule, and its drawing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.branching.bim import EMPTY, TRUNK, bim_mask, branch_index_map, draw_bim
from kernels_pallas.visibility import visible
from tests.attention.lanes import Lane, branched_lane, plain_lane, with_tail
from tests.programs.lane_steps import GrowingLane

seeds = st.integers(0, 2**32).map(np.random.default_rng)
page_sizes = st.sampled_from([1, 4, 16])
branch_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4)


def bim_of(lane: Lane) -> np.ndarray:
    """The map of what precedes the lane's tail."""
    written = [index for index in lane.written if index < lane.tail_start]
    return branch_index_map(lane.page_size, lane.owners, lane.trunk_len, written)


def engines_rule(lane: Lane) -> np.ndarray:
    """bool [queries, lane]: what the engine shows in front of the tail; tail bits are not part of it."""

    def column(name: str) -> np.ndarray:
        return np.array([getattr(query, name) for query in lane.queries], np.int32)[:, None]

    owners = np.repeat(np.asarray(lane.owners, np.int32), lane.page_size)
    return np.asarray(
        visible(
            np.arange(len(owners), dtype=np.int32)[None],
            limit=column("limit"),
            branch=column("branch"),
            tail_bits=np.zeros((1, 1, 0), np.uint32),
            trunk_len=np.int32(lane.trunk_len),
            tail_start=np.int32(lane.tail_start),
            index_branch=owners[None],
        )
    )


def check_mask(lane: Lane) -> None:
    """The mask of the map is the engine's rule, and shows each query what it was built to see."""
    limits, branches = ([getattr(query, name) for query in lane.queries] for name in ("limit", "branch"))
    mask = bim_mask(bim_of(lane), branches, limits)
    assert np.array_equal(mask, engines_rule(lane))
    for row, query in zip(mask, lane.queries, strict=True):
        assert set(np.flatnonzero(row).tolist()) == {index for index in query.sees if index < lane.tail_start}


def test_the_map_of_a_trunk_of_6_and_two_branches_in_pages_of_4():
    bim = branch_index_map(4, [0, 0, 1, 0], trunk_len=6, written=[*range(8), 8, 12])
    assert bim.dtype == np.int32
    assert bim.tolist() == [-1, -1, -1, -1, -1, -1, 0, 0, 1, -2, -2, -2, 0, -2, -2, -2]


def test_a_branch_sees_the_trunk_and_itself_up_to_the_query_and_padding_sees_nothing():
    mask = bim_mask(np.array([-1, -1, 0, 1, 0, -2, 1, 0]), query_bim=[0, 1, TRUNK, EMPTY], query_index=[4, 6, 0, 7])
    assert mask.astype(int).tolist() == [
        [1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


@given(page_size=page_sizes, context=st.integers(0, 40), new=st.integers(1, 40))
def test_of_a_plain_lane_the_mask_is_the_engines_rule(page_size, context, new):
    check_mask(plain_lane(page_size, context, new))


@given(page_size=page_sizes, rng=seeds, trunk=st.integers(0, 40), lengths=branch_lengths, new=st.integers(1, 4))
def test_of_random_branches_the_mask_is_the_engines_rule(page_size, rng, trunk, lengths, new):
    check_mask(branched_lane(rng, page_size, trunk, lengths, new=new))


@given(page_size=page_sizes, rng=seeds, trunk=st.integers(0, 20), lengths=branch_lengths, nodes=st.integers(1, 30))
def test_draft_nodes_of_branches_see_by_the_map_what_lies_in_front_of_the_tail(page_size, rng, trunk, lengths, nodes):
    check_mask(with_tail(rng, branched_lane(rng, page_size, trunk, lengths), nodes))


@given(page_size=page_sizes, rng=seeds, trunk=st.integers(1, 30), turns=st.integers(1, 12))
def test_of_a_lane_that_grows_and_closes_up_the_mask_is_the_engines_rule(page_size, rng, trunk, turns):
    lane = GrowingLane(page_size, list(range(400)))
    check_mask(lane.view(lane.extend([0] * trunk)))
    lane.fork(4, first_takes_boundary=bool(rng.integers(2)))
    for _ in range(turns):
        if len(lane.branches) > 1 and rng.random() < 0.2:
            lane.finish(int(rng.choice(list(lane.branches))))
        grown = [lane.extend([0] * int(rng.integers(5)), branch) for branch in lane.branches]
        check_mask(lane.view([query for queries in grown for query in queries]))


@pytest.mark.parametrize("index", [-1, 16])
def test_content_outside_of_the_lane_is_refused(index):
    with pytest.raises(ValueError, match=f"lane index {index} is outside of a lane of 16"):
        branch_index_map(4, [-1, 0, 0, 1], 4, [0, index])


def test_content_behind_the_trunk_in_a_page_of_nobody_is_refused():
    with pytest.raises(ValueError, match="lane index 6 is after the trunk"):
        branch_index_map(4, [-1, -1], 6, range(7))


def test_the_drawing_has_a_line_for_each_page_and_says_in_words_what_stands_there():
    bim = branch_index_map(8, [-1, -1, 0, 1], trunk_len=19, written=[*range(22), 24, 25, 26])
    assert draw_bim(bim, 8) == (
        "pages 0-1  ________  trunk x16\n"
        "page 2     ___000..  trunk x3, branch 0 x3, empty x2\n"
        "page 3     111.....  branch 1 x3, empty x5"
    )


def test_branches_beyond_the_ninth_are_drawn_as_letters_and_named_by_number():
    assert draw_bim(np.array([10, 35, 36, EMPTY]), 4) == (
        "page 0  az0.  branch 10 x1, branch 35 x1, branch 36 x1, empty x1"
    )


def test_a_lane_without_pages_is_drawn_as_nothing():
    assert draw_bim(branch_index_map(4, [], 0, []), 4) == ""

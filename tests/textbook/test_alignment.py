"""Alignment by left padding: the worked numbers, and what holds in every round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxinfer.textbook.alignment import AlignmentManager, ContinuousDecodingState
from tests.branching.stories import MOST_BRANCHES, PAD, random_rounds


def tokens_from(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def manager_of_100_98_and_99() -> AlignmentManager:
    """Three branches as the worked example finds them: 98 shared tokens, then a round of 2, 0 and 1."""
    manager = AlignmentManager(3, pad_token_id=PAD, prefix_len=98)
    manager.align_for_decode([2, 0, 1], [[1, 2], [], [3]])
    return manager


# The worked numbers.


def test_accepted_3_1_and_2_tokens_are_padded_on_the_left_to_three_columns():
    state = manager_of_100_98_and_99().align_for_decode([3, 1, 2], [[10, 11, 12], [20], [30, 31]])
    assert state.input_ids.tolist() == [[10, 11, 12], [PAD, PAD, 20], [PAD, 30, 31]]
    assert state.padding_mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert state.padding_lengths.tolist() == [0, 2, 1]
    assert state.input_lengths.tolist() == [3, 1, 2]


def test_positions_go_on_from_100_98_and_99_while_all_rows_of_the_cache_are_equally_long():
    manager = manager_of_100_98_and_99()
    assert (manager.cache_length, manager.valid_lengths.tolist()) == (100, [100, 98, 99])
    state = manager.align_for_decode([3, 1, 2], [[10, 11, 12], [20], [30, 31]])
    assert state.position_ids.tolist() == [[100, 101, 102], [0, 0, 98], [0, 99, 100]]
    assert (state.cache_length, state.valid_lengths.tolist()) == (103, [103, 99, 101])
    assert state.attention_mask.shape == (3, 103) and state.query_mask.shape == (3, 3, 103)


def two_branches_of_150() -> AlignmentManager:
    manager = AlignmentManager(2, pad_token_id=PAD, prefix_len=50)
    manager.align_for_decode([100, 100], [tokens_from(0, 100), tokens_from(200, 100)])
    return manager


def test_a_branch_of_200_tokens_joins_two_that_decode_2():
    manager = two_branches_of_150()
    assert (manager.cache_length, manager.valid_lengths.tolist()) == (150, [150, 150])
    state = manager.align_continuous_decode([tokens_from(300, 200)], [[1, 2], [3, 4]])
    assert isinstance(state, ContinuousDecodingState)
    assert state.cache_length == 350
    assert state.valid_lengths.tolist() == [152, 152, 250]
    assert state.input_lengths.tolist() == [2, 2, 200]
    assert state.is_prefill.tolist() == [False, False, True]
    assert state.branch_ids == (0, 1, 2)
    assert state.padding_mask.shape == state.position_ids.shape == state.input_ids.shape == (3, 200)
    assert state.position_ids[:2, 198:].tolist() == [[150, 151], [150, 151]]
    assert state.position_ids[2].tolist() == tokens_from(50, 200)
    assert state.input_ids[0].tolist() == [PAD] * 198 + [1, 2]
    assert state.input_ids[2].tolist() == tokens_from(300, 200)


def test_a_branch_that_joins_has_the_prefix_a_hole_and_its_prompt_and_the_old_ones_a_hole_of_198():
    state = two_branches_of_150().align_continuous_decode([tokens_from(300, 200)], [[1, 2], [3, 4]])
    old, new = state.attention_mask[0], state.attention_mask[2]
    assert old[:150].all() and not old[150:348].any() and old[348:].all()
    assert new[:50].all() and not new[50:150].any() and new[150:].all()
    assert state.padding_lengths.tolist() == [198, 198, 0]  # two thirds of the round are computed for nothing


# SpecSoT's own calls: a device in second place, results that unpack, lengths under its names.


def sources_manager() -> AlignmentManager:
    manager = AlignmentManager(3, "cpu")
    manager.cache_lengths = [100, 98, 99]
    return manager


def test_the_sources_call_gives_the_worked_numbers_as_arrays_on_the_device():
    manager = sources_manager()
    input_ids, attention_mask, position_ids = manager.align_for_decode(
        jnp.array([3, 1, 2]), [jnp.array([10, 11, 12]), jnp.array([20]), jnp.array([30, 31])]
    )
    assert input_ids.tolist() == [[10, 11, 12], [0, 0, 20], [0, 30, 31]]
    assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert position_ids.tolist() == [[100, 101, 102], [0, 0, 98], [0, 99, 100]]
    assert manager.cache_lengths.tolist() == [103, 99, 101]
    assert manager.padding_lengths.tolist() == manager.position_offsets.tolist() == [0, 2, 1]
    for array in (input_ids, attention_mask, position_ids, manager.cache_lengths, manager.padding_lengths):
        assert isinstance(array, jax.Array) and array.devices() == {jax.devices("cpu")[0]}


def test_offsets_take_columns_to_positions():
    manager = sources_manager()
    before = manager.cache_lengths
    state = manager.align_for_decode([3, 1, 2], [[1, 2, 3], [4], [5, 6]])
    columns = before[:, None] + np.arange(3) - state.position_offsets[:, None]
    assert np.array_equal(columns[state.padding_mask], state.position_ids[state.padding_mask])


def test_a_continuous_round_unpacks_into_what_the_source_returns():
    state = two_branches_of_150().align_continuous_decode([tokens_from(300, 200)], [[1, 2], [3, 4]])
    input_ids, attention_mask, position_ids, is_prefill = state
    assert input_ids is state.input_ids and position_ids is state.position_ids
    assert np.array_equal(attention_mask, state.query_mask) and attention_mask.shape == (3, 200, 350)
    assert is_prefill == [False, False, True]


def test_lengths_that_are_assigned_leave_a_hole_after_the_prefix():
    manager = AlignmentManager(2, prefix_len=3)
    manager.cache_lengths = [4, 6]
    assert manager.attention_mask.tolist() == [[1, 1, 1, 0, 0, 1], [1] * 6]
    with pytest.raises(ValueError, match=r"cache_lengths: assigned after a round; the rows hold \[4, 6\]"):
        manager.cache_lengths = [4, 6]


def test_rounds_that_are_truncated_are_forgotten_by_every_branch():
    manager = manager_of_100_98_and_99()
    manager.align_for_decode([3, 1, 2], [[10, 11, 12], [20], [30, 31]])
    manager.truncate(100)
    assert (manager.cache_length, manager.valid_lengths.tolist()) == (100, [100, 98, 99])


def test_results_cannot_be_written_to():
    manager = AlignmentManager(2, prefix_len=3)
    with pytest.raises(ValueError, match="read-only"):
        manager.cache_lengths[0] = 9
    assert manager.cache_lengths.tolist() == [3, 3]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_integer_in_second_place_is_still_the_token_of_padding(device):
    with pytest.warns(DeprecationWarning, match="pad_token_id by its name"):
        old = AlignmentManager(2, PAD)
    new = AlignmentManager(2, device, PAD)
    for manager in (old, new):
        assert manager.align_for_decode([1, 2], [[4], [7, 8]]).input_ids.tolist() == [[PAD, 4], [7, 8]]


# What holds in every round.


def test_a_branch_that_accepts_nothing_stays_as_it_is():
    manager = manager_of_100_98_and_99()
    state = manager.align_for_decode([2, 0, 1], [[1, 2], [8, 9], [3]])
    assert state.input_ids[1].tolist() == [PAD, PAD]
    assert state.valid_lengths.tolist() == [102, 98, 100]
    assert not state.query_mask[1].any()
    assert manager.align_for_decode([0, 1, 0], [[], [5], []]).position_ids.tolist() == [[0], [98], [0]]


def test_a_round_in_which_nobody_accepts_anything_has_no_columns():
    manager = manager_of_100_98_and_99()
    state = manager.align_for_decode([0, 0, 0], [[], [], []])
    assert state.input_ids.shape == (3, 0) and state.query_mask.shape == (3, 0, 100)
    assert (state.cache_length, state.valid_lengths.tolist()) == (100, [100, 98, 99])


def test_tokens_beyond_the_accepted_ones_are_dropped():
    state = AlignmentManager(2, pad_token_id=PAD).align_for_decode([1, 2], [[4, 5, 6], np.array([7, 8, 9])])
    assert state.input_ids.tolist() == [[PAD, 4], [7, 8]]


def test_branches_keep_their_ids_when_one_is_removed_and_ids_are_never_used_twice():
    manager = manager_of_100_98_and_99()
    manager.remove_branch(1)
    state = manager.align_for_decode([1, 2], [[1], [2, 3]])
    assert state.branch_ids == (0, 2)
    assert state.position_ids.tolist() == [[0, 100], [99, 100]]
    manager.remove_branch(2)
    joined = manager.align_continuous_decode([[5, 6, 7]], [[4]])
    assert joined.branch_ids == (0, 3) and joined.is_prefill.tolist() == [False, True]
    assert joined.valid_lengths.tolist() == [102, 101]


def test_when_all_branches_have_gone_new_ones_still_start_behind_the_prefix():
    manager = manager_of_100_98_and_99()
    for branch in (0, 1, 2):
        manager.remove_branch(branch)
    assert manager.align_for_decode([], []).input_ids.shape == (0, 0)
    state = manager.align_continuous_decode([[5], [6, 7]], [])
    assert state.position_ids.tolist() == [[0, 98], [98, 99]] and state.cache_length == 102


def test_states_of_earlier_rounds_stay_as_they_were():
    manager = manager_of_100_98_and_99()
    before = manager.align_for_decode([1, 1, 1], [[1], [2], [3]])
    mask = before.attention_mask.copy()
    manager.remove_branch(0)
    manager.align_continuous_decode([[5, 6]], [[1], [2]])
    assert np.array_equal(before.attention_mask, mask) and before.branch_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda manager: manager.align_for_decode([1, 1], [[1], [2]]), "accept_lengths: 2 of them"),
        (lambda manager: manager.align_for_decode([1, 1, 1], [[1], [2]]), "accepted_tokens: 2 of them"),
        (lambda manager: manager.align_for_decode([1, 2, 1], [[1], [2], [3]]), "2 of branch 1, which has 1"),
        (lambda manager: manager.align_for_decode([1, -1, 1], [[1], [2], [3]]), "-1 of branch 1"),
        (lambda manager: manager.align_continuous_decode([[1]], [[1]]), "old_branch_tokens: 1 of them"),
        (lambda manager: manager.remove_branch(3), "branch_id: 3"),
        (lambda manager: manager.truncate(97), "cache_length: 97, allowed are 98 to 100"),
        (lambda manager: manager.truncate(101), "cache_length: 101"),
        (lambda manager: setattr(manager, "cache_lengths", [98, 98]), "cache_lengths: 2 of them"),
        (lambda manager: AlignmentManager(3, "warp:0"), "device must be one of .*cpu:0.* got 'warp:0'"),
        (lambda manager: AlignmentManager(3, 0, 0), "device: 0, allowed are None"),
    ],
)
def test_a_misuse_is_refused_by_name_and_changes_nothing(misuse, message):
    manager = manager_of_100_98_and_99()
    with pytest.raises(ValueError, match=message):
        misuse(manager)
    assert (manager.cache_length, manager.branch_ids, manager.valid_lengths.tolist()) == (100, (0, 1, 2), [100, 98, 99])


@given(random_rounds())
def test_in_every_round_the_valid_slots_hold_the_branch_in_order_and_holes_stay_holes(story_and_rounds):
    story, rounds = story_and_rounds
    start = len(story.prefix)
    cells = {
        branch: list(story.prefix) for branch in range(MOST_BRANCHES)
    }  # the token ids in each row's slots, padding too
    hidden: dict[int, set[int]] = {}
    for grow in rounds:
        state = grow()
        width, end = state.input_ids.shape[1], state.cache_length
        assert end == start + width
        for row, branch in enumerate(state.branch_ids):
            cells[branch] += [PAD] * (start - len(cells[branch])) + state.input_ids[row].tolist()
            valid = state.attention_mask[row]
            assert [cells[branch][slot] for slot in np.flatnonzero(valid)] == story.sequences[branch]
            assert state.valid_lengths[row] == len(story.sequences[branch])
            holes = set(np.flatnonzero(~valid).tolist())
            assert hidden.get(branch, set()) <= holes
            hidden[branch] = holes
            for column in range(width):
                seen = np.flatnonzero(state.query_mask[row, column]).tolist()
                if state.padding_mask[row, column]:
                    assert state.position_ids[row, column] == len(seen) - 1
                    assert seen == [slot for slot in range(start + column + 1) if slot not in holes]
                else:
                    assert seen == [] and state.input_ids[row, column] == PAD
        start = end

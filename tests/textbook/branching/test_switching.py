"""A switch of modes in the midst of a story: the other mode continues as if it had been the mode from the start."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer.textbook.branching import BranchStateManager, KVCache
from tests.textbook.branching.stories import CAPACITY, Story, stories

HEADS, DIM = 1, 2


def fill(manager: BranchStateManager, story: Story) -> None:
    """A cache as a model would have filled it: what is in a slot says which branch and position it is for."""
    sequence = manager.one_sequence
    if manager.use_bim_mode:
        marks = np.stack([sequence.bim, sequence.position_ids], axis=-1)[None]
    else:
        held = np.asarray(manager.alignment_manager.attention_mask)
        marks = np.full((CAPACITY_ROWS, held.shape[1], DIM), -7)
        for branch, own in story.own.items():
            row = manager.alignment_manager.branch_ids.index(branch)
            depth = np.arange(story.prefix_len + len(own))
            owner = np.where(depth < story.prefix_len, -1, branch)
            marks[branch, np.flatnonzero(held[row])] = np.stack([owner, depth], axis=-1)
        for row in range(CAPACITY_ROWS):  # the prefix was copied into all of them
            marks[row, : story.prefix_len] = np.stack([[-1] * story.prefix_len, range(story.prefix_len)], axis=-1)
    cache = KVCache((len(marks), HEADS, CAPACITY, DIM), "cpu")
    cache.append(jnp.asarray(marks[:, None], jnp.float32))
    manager.cache = cache


CAPACITY_ROWS = 5


def held_by(manager: BranchStateManager, branch: int) -> list[list[int]]:
    """The marks of a branch's tokens in its order, as attention would find them."""
    assert isinstance(manager.cache, KVCache)
    data = np.asarray(manager.cache.get_valid())[:, 0].astype(int)
    if manager.use_bim_mode:
        (seen,) = manager.build_decode_attention_mask([branch], dtype=bool)[0, 0]
        return data[0, np.flatnonzero(seen)].tolist()
    manager_rows = manager.alignment_manager
    row = manager_rows.branch_ids.index(manager.active_branches.index(branch))
    return data[row, np.flatnonzero(manager_rows.attention_mask[row])].tolist()


@settings(max_examples=12)
@given(stories())
def test_a_switched_manager_has_every_branch_where_the_other_mode_looks_for_it(story_and_events):
    story, events = story_and_events
    for event in events:
        getattr(story, event)()
    for manager in story.managers:
        fill(manager, story)
        before = manager.cache
        rows, slots = manager.switch_mode(not manager.use_bim_mode)
        assert manager.cache is not before and rows.shape == slots.shape
        for branch, own in story.own.items():
            prefix = [[-1, depth] for depth in range(story.prefix_len)]
            assert held_by(manager, branch) == prefix + [[branch, story.prefix_len + i] for i in range(len(own))]
        assert manager.branch_cache_lengths == {b: story.prefix_len + len(own) for b, own in story.own.items()}


@settings(max_examples=12)
@given(stories())
def test_rounds_after_a_switch_are_those_of_a_manager_of_that_mode(story_and_events):
    story, events = story_and_events
    for event in events:
        getattr(story, event)()
    in_one, batch = story.managers
    in_one.switch_mode(False)
    batch.switch_mode(True)
    state, (input_ids, mask, position_ids) = story.decode()
    assert state.input_ids[state.padding_mask].tolist() == input_ids[0].tolist()
    assert state.position_ids[state.padding_mask].tolist() == position_ids[0].tolist()
    assert state.query_mask[state.padding_mask].sum(1).tolist() == (mask[0, 0] == 0).sum(1).tolist()
    story.add()
    in_one.switch_mode(True)
    batch.switch_mode(False)
    assert in_one.branch_outputs == batch.branch_outputs
    assert in_one.get_tip_positions().tolist() == batch.get_tip_positions().tolist()


def three(use_bim_mode: bool) -> BranchStateManager:
    manager = BranchStateManager(30, None, use_bim_mode, num_branches=3)
    manager.init_prefix(4)
    for branch, prompt in enumerate([[10, 11], [20], [30, 31, 32]]):
        manager.add_branch(branch, prompt)
    return manager


def test_rows_of_a_batch_are_padded_after_the_prefix():
    rows, slots = three(True).switch_mode(False)
    assert slots.tolist() == [[0, 1, 2, 3, -1, 4, 5], [0, 1, 2, 3, -1, -1, 6], [0, 1, 2, 3, 7, 8, 9]]
    assert np.array_equal(rows, np.where(slots < 0, -1, 0))


def test_one_sequence_takes_the_prefix_once_and_no_padding():
    rows, slots = three(False).switch_mode(True)
    assert rows.tolist() == [[0, 0, 0, 0, 0, 0, 1, 2, 2, 2]]
    assert slots.tolist() == [[0, 1, 2, 3, 5, 6, 6, 4, 5, 6]]


def test_more_branches_than_rows_get_rows():
    manager = BranchStateManager(30, None, True)
    manager.init_prefix(1)
    for branch in range(3):
        manager.add_branch(branch, [branch])
    manager.switch_mode(False)
    assert manager.num_branches == 3 and manager.alignment_manager.branch_ids == (0, 1, 2)


def test_the_capacity_is_that_of_the_new_mode():
    manager = three(True)
    manager.switch_mode(False, capacity=9)
    assert manager.capacity == 9
    with pytest.raises(ValueError, match="capacity: 9 slots, but 10 are needed"):
        manager.prepare_decode_inputs([3, 0, 0], [[1, 2, 3], [], []])


def test_a_cache_that_lacks_tokens_is_not_switched():
    manager = three(True)
    manager.cache = KVCache((1, 1, 30, 2))
    manager.cache.append(jnp.zeros((1, 1, 9, 2)))
    with pytest.raises(ValueError, match="cache: its current_length is 9, but a token was prepared for slot 9"):
        manager.switch_mode(False)
    assert manager.use_bim_mode and manager.cache.capacity == 30

"""The manager of branches: the source's layouts by their numbers, masks by the engine's rule, and both modes alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer.textbook.alignment import AlignmentState
from jaxinfer.textbook.branching import AlignmentManager, BranchStateManager, ContinuousDecodingState, KVCache
from kernels_pallas.visibility import visible
from tests.textbook.branching.stories import CAPACITY, stories

MODES = [True, False]


def manager_of_three(use_bim_mode: bool, prefix_len: int = 4, capacity: int = 40) -> BranchStateManager:
    """Branches 0, 1 and 2 with prompts of 2, 1 and 3 tokens."""
    manager = BranchStateManager(capacity, "cpu", use_bim_mode=use_bim_mode, num_branches=4)
    manager.init_prefix(prefix_len)
    for branch, prompt in enumerate([[10, 11], [20], [30, 31, 32]]):
        manager.add_branch(branch, prompt)
    return manager


# The source's layouts.


def test_the_map_has_the_prefix_then_branch_after_branch_and_positions_start_anew_after_the_prefix():
    manager = BranchStateManager(capacity=16, device="cpu", use_bim_mode=True)
    manager.init_prefix(4)
    assert [manager.add_branch(b, [7] * n) for b, n in enumerate((2, 3, 2))] == [4, 6, 9]
    assert manager.bim.tolist() == [-1] * 4 + [0] * 2 + [1] * 3 + [2] * 2 + [-2] * 5
    assert manager.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 4, 5, 0, 0, 0, 0, 0]
    assert isinstance(manager.bim, jax.Array) and manager.bim.shape == (16,)
    assert manager.current_length == 11 and manager.prefix_len == 4
    assert manager.active_branches == [0, 1, 2]
    assert manager.branch_tips == {0: 5, 1: 8, 2: 10}
    assert manager.branch_outputs == {0: [7, 7], 1: [7, 7, 7], 2: [7, 7]}
    assert manager.branch_cache_lengths == {0: 6, 1: 7, 2: 6}


def test_tips_are_the_latest_tokens_of_the_branches():
    manager = manager_of_three(True)
    assert manager.get_branch_tip_indices().tolist() == [5, 6, 9]
    assert manager.get_tip_token_ids().tolist() == [11, 20, 32]
    assert manager.get_tip_positions().tolist() == [5, 4, 6]
    manager.prepare_decode_inputs(jnp.array([0, 2, 1]), [jnp.array([]), jnp.array([21, 22]), jnp.array([33])])
    assert manager.get_branch_tip_indices().tolist() == [5, 11, 12]
    assert manager.get_tip_token_ids().tolist() == [11, 22, 33]
    assert manager.get_tip_positions().tolist() == [5, 6, 7]


def test_accepted_tokens_are_one_sequence_that_continues_from_the_tips():
    manager = manager_of_three(True)
    input_ids, attention_mask, position_ids = manager.prepare_decode_inputs(
        jnp.array([3, 1, 2]), [jnp.array([12, 13, 14]), jnp.array([21, 99]), jnp.array([33, 34])]
    )
    assert input_ids.tolist() == [[12, 13, 14, 21, 33, 34]]
    assert position_ids.tolist() == [[6, 7, 8, 5, 7, 8]]
    assert attention_mask.shape == (1, 1, 6, 16) and attention_mask.dtype == jnp.float32
    assert manager.bim[10:16].tolist() == [0, 0, 0, 1, 2, 2] and manager.current_length == 16


def test_accepted_tokens_do_not_see_what_comes_after_them_in_their_branch():
    manager = manager_of_three(True)
    _, mask, _ = manager.prepare_decode_inputs([2, 0, 1], [[12, 13], [], [33]])
    seen = np.asarray(mask)[0, 0] == 0
    assert [np.flatnonzero(row).tolist() for row in seen] == [
        [0, 1, 2, 3, 4, 5, 10],
        [0, 1, 2, 3, 4, 5, 10, 11],
        [0, 1, 2, 3, 7, 8, 9, 12],
    ]
    assert np.unique(mask).tolist() == [jnp.finfo(jnp.float32).min, 0]


def test_in_batching_mode_accepted_tokens_are_the_sources_rectangle():
    manager = BranchStateManager(200, "cpu", num_branches=3)
    manager.init_prefix(97)
    for branch, count in enumerate((3, 1, 2)):  # caches of 100, 98 and 99 tokens
        assert manager.add_branch(branch, [5] * count) == 97
    assert isinstance(manager.alignment_manager, AlignmentManager)
    assert manager.alignment_manager.cache_lengths.tolist() == [100, 98, 99]
    input_ids, attention_mask, position_ids = manager.prepare_decode_inputs([3, 1, 2], [[1, 2, 3], [4], [5, 6]])
    assert input_ids.tolist() == [[1, 2, 3], [0, 0, 4], [0, 5, 6]]
    assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert position_ids.tolist() == [[100, 101, 102], [0, 0, 98], [0, 99, 100]]
    assert manager.alignment_manager.padding_lengths.tolist() == [0, 2, 1]
    assert manager.branch_cache_lengths == {0: 103, 1: 99, 2: 101}


def two_of_150(use_bim_mode: bool) -> BranchStateManager:
    manager = BranchStateManager(600, None, use_bim_mode, num_branches=3)
    manager.init_prefix(50)
    manager.add_branch(0, list(range(100)))
    manager.add_branch(1, list(range(100)))
    manager.prepare_prefill_inputs()
    return manager


def test_a_prompt_of_200_tokens_joins_two_branches_that_decode_2():
    state = two_of_150(False).prepare_continuous_inputs([2, 2], [[1, 2], [3, 4]], {2: list(range(200))})
    assert isinstance(state, ContinuousDecodingState)
    assert state.cache_length == 350
    assert state.valid_lengths.tolist() == [152, 152, 250]
    assert state.input_lengths.tolist() == [2, 2, 200]
    assert state.is_prefill.tolist() == [False, False, True]
    assert state.input_ids.shape == state.padding_mask.shape == state.position_ids.shape == (3, 200)
    assert state.position_ids[:2, 198:].tolist() == [[150, 151]] * 2
    assert state.position_ids[2].tolist() == list(range(50, 250))


def test_in_one_sequence_the_same_round_has_204_tokens_and_not_600():
    manager = two_of_150(True)
    input_ids, mask, position_ids = manager.prepare_continuous_inputs([2, 2], [[1, 2], [3, 4]], {2: list(range(200))})
    assert input_ids.shape == position_ids.shape == (1, 204) and mask.shape == (1, 1, 204, 454)
    assert position_ids[0, :6].tolist() == [150, 151, 150, 151, 50, 51]
    assert manager.branch_cache_lengths == {0: 152, 1: 152, 2: 250}


# Prompts.


def test_prompts_are_one_sequence_or_one_rectangle_until_they_are_computed():
    input_ids, mask, position_ids = manager_of_three(True).prepare_prefill_inputs()
    assert input_ids.tolist() == [[10, 11, 20, 30, 31, 32]]
    assert position_ids.tolist() == [[4, 5, 4, 4, 5, 6]] and mask.shape == (1, 1, 6, 10)
    state = manager_of_three(False).prepare_prefill_inputs()
    assert isinstance(state, AlignmentState)
    assert state.input_ids.tolist() == [[0, 10, 11], [0, 0, 20], [30, 31, 32], [0, 0, 0]]  # num_branches=4
    assert state.position_ids.tolist() == [[0, 4, 5], [0, 0, 4], [4, 5, 6], [0, 0, 0]]
    assert state.cache_length == 7


@pytest.mark.parametrize("use_bim_mode", MODES)
def test_a_prompt_that_was_prepared_is_not_prepared_again(use_bim_mode):
    manager = manager_of_three(use_bim_mode)
    manager.prepare_prefill_inputs()
    manager.add_branch(3, [40, 41])
    manager.remove_branch(1)
    first, *_ = manager.prepare_prefill_inputs()
    assert first.tolist() == ([[40, 41]] if use_bim_mode else [[0, 0], [0, 0], [40, 41]])
    with pytest.raises(ValueError, match="add_branch comes first"):
        manager.prepare_prefill_inputs()


def test_a_branch_that_is_removed_before_its_prompt_is_computed_leaves_no_trace_in_the_rectangle():
    manager = manager_of_three(False)
    manager.remove_branch(2)
    assert manager.prepare_prefill_inputs().input_ids.tolist() == [[10, 11], [0, 20], [0, 0]]


# Masks.


@pytest.mark.parametrize("query_len", [0, 1, 6, 10])
def test_the_mask_of_prompts_is_of_the_last_tokens(query_len):
    mask = manager_of_three(True).build_prefill_attention_mask(query_len, dtype=bool)
    whole = manager_of_three(True).build_prefill_attention_mask(10, dtype=bool)
    assert mask.shape == (1, 1, query_len, 10) and np.array_equal(mask, whole[:, :, 10 - query_len :])


def test_masks_have_the_dtype_that_is_asked_for():
    mask = manager_of_three(True).build_decode_attention_mask(jnp.array([0, 1, 2]), dtype=jnp.bfloat16)
    assert mask.dtype == jnp.bfloat16 and float(mask.min()) == float(jnp.finfo(jnp.bfloat16).min)


def test_queries_of_a_branch_are_its_newest_tokens_in_order():
    mask = manager_of_three(True).build_decode_attention_mask([2, 0, 2, -2], dtype=bool)
    assert [np.flatnonzero(row).tolist() for row in mask[0, 0]] == [
        [0, 1, 2, 3, 7, 8],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 7, 8, 9],
        [],
    ]


@jax.jit
def engines_rule(bim: jax.Array, indices: jax.Array, trunk_len: jax.Array) -> jax.Array:
    return visible(
        jnp.arange(len(bim))[None], limit=indices[:, None], branch=bim[indices][:, None],
        tail_bits=jnp.zeros((1, 1, 0), jnp.uint32), trunk_len=trunk_len, tail_start=jnp.int32(len(bim)),
        index_branch=bim[None],
    )  # fmt: skip


def by_the_engines_rule(bim: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """What `visible` says, with a page for every index; padded to one shape, so that one program is compiled."""
    whole, queries = np.full(CAPACITY, -2, np.int32), np.zeros(CAPACITY, np.int32)
    whole[: len(bim)], queries[: len(indices)] = bim, indices
    seen = engines_rule(whole, queries, np.int32(np.sum(bim == -1)))
    return np.asarray(seen)[: len(indices), : len(bim)]


@settings(max_examples=30)
@given(stories())
def test_in_any_story_masks_follow_the_engines_rule_and_both_modes_hold_the_same(story_and_events):
    story, events = story_and_events
    in_one, batch = story.managers
    for event in events:
        before = in_one.current_length
        if event == "decode":
            (ids, mask, positions), state = story.decode()
            length = in_one.current_length
            expected = by_the_engines_rule(in_one.bim[:length], np.arange(before, length))
            assert np.array_equal(mask[0, 0] == 0, expected)
            assert ids[0].tolist() == state.input_ids[state.padding_mask].tolist()
            assert positions[0].tolist() == state.position_ids[state.padding_mask].tolist()
            # As many keys are seen, at the same positions, though other slots hold them.
            assert (mask[0, 0] == 0).sum(1).tolist() == state.query_mask[state.padding_mask].sum(1).tolist()
        else:
            getattr(story, event)()
        length = in_one.current_length
        whole = in_one.build_prefill_attention_mask(length, dtype=bool)[0, 0]
        live = in_one.bim[:length] != -2
        assert np.array_equal(whole[live], by_the_engines_rule(in_one.bim[:length], np.arange(length))[live])
        assert not whole[~live].any()
        for manager in story.managers:
            assert {b: manager.branch_outputs[b] for b in manager.active_branches} == story.own
            assert manager.branch_cache_lengths == {b: story.prefix_len + len(own) for b, own in story.own.items()}
            assert manager.get_tip_token_ids().tolist() == [own[-1] for own in story.own.values()]
            assert manager.get_tip_positions().tolist() == [story.prefix_len + len(o) - 1 for o in story.own.values()]
        for branch, own in story.own.items():
            assert in_one.one_sequence.token_ids[in_one.bim[:length] == branch].tolist() == own
            row = batch.alignment_manager.branch_ids.index(branch)  # rows are taken in the order of ids here
            assert batch.alignment_manager.valid_lengths[row] == story.prefix_len + len(own)


# The prefix's KV.


def prefix_cache(length: int = 4, capacity: int = 40) -> KVCache:
    cache = KVCache((1, 2, capacity, 3), "cpu")
    cache.append(jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, length, 3)), jnp.float32))
    return cache


def test_batching_copies_the_prefix_once_for_each_branch_and_one_sequence_not_at_all():
    given_cache = prefix_cache()
    managers = [BranchStateManager(40, "cpu", mode, num_branches=3) for mode in MODES]
    for manager in managers:
        manager.init_prefix(4, given_cache)
    in_one, batch = (manager.cache for manager in managers)
    assert in_one is given_cache
    assert isinstance(batch, KVCache) and batch.data.shape == (3, 2, 40, 3) and batch.current_length == 4
    assert all(np.array_equal(row, given_cache.get_valid()[0]) for row in batch.get_valid())


# Misuse.


@pytest.mark.parametrize(
    ("use_bim_mode", "misuse", "message"),
    [
        (False, lambda m: m.build_prefill_attention_mask(1), "use_bim_mode=False: use a standard attention mask"),
        (False, lambda m: m.build_decode_attention_mask([0]), "use_bim_mode=False: use alignment_manager"),
        (True, lambda m: m.build_prefill_attention_mask(11), "query_len: 11, allowed are 0 to 10"),
        (True, lambda m: m.build_decode_attention_mask([1, 1]), "query_bim: 2 queries of branch 1, which has 1 token"),
        (True, lambda m: m.build_decode_attention_mask([0], dtype=jnp.int32), "dtype: int32, allowed are bool and"),
        (True, lambda m: m.add_branch(1, [5]), "branch_id: 1, allowed"),
        (False, lambda m: m.add_branch(-1, [5]), "branch_id: -1, allowed"),
        (True, lambda m: m.add_branch(3, []), "tokens: branch 3 has none"),
        (True, lambda m: m.add_branch(3, [1] * 31), "capacity: 40 slots, but 41 are needed"),
        (False, lambda m: m.add_branch(3, [1] * 37), "capacity: 40 slots, but 41 are needed"),
        (False, lambda m: m.prepare_continuous_inputs([0] * 3, [[]] * 3, {5: [1], 6: [1]}), "num_branches: 4 rows, 3"),
        (True, lambda m: m.prepare_decode_inputs([1], [[1]]), "accept_lengths: 1 of them for the branches"),
        (False, lambda m: m.prepare_decode_inputs([1] * 3, [[1]]), "accepted_tokens: 1 of them"),
        (True, lambda m: m.prepare_decode_inputs([1, 2, 0], [[1]] * 3), "accept_lengths: 2 of branch 1, which has 1"),
        (True, lambda m: m.prepare_decode_inputs([31, 0, 0], [[1] * 31] * 3), "capacity: 40 slots, but 41"),
        (True, lambda m: m.remove_branch(7), r"branch_id: 7 is none of \[0, 1, 2\]"),
        (True, lambda m: m.init_prefix(2), "prefix_len: 2, but there is a prefix of 4"),
        (True, lambda m: m.switch_mode(True), "use_bim_mode: True is the mode already"),
        (True, lambda m: m.switch_mode(False, 6), "capacity: 6, but the other mode needs 7 slots"),
    ],
)
def test_a_misuse_is_refused_by_name_and_changes_nothing(use_bim_mode, misuse, message):
    manager = manager_of_three(use_bim_mode)
    with pytest.raises(ValueError, match=message):
        misuse(manager)
    assert manager.use_bim_mode == use_bim_mode and manager.active_branches == [0, 1, 2]
    assert manager.branch_outputs == {0: [10, 11], 1: [20], 2: [30, 31, 32]}
    assert len(manager.one_sequence) == 10
    first, *_ = manager.prepare_prefill_inputs()
    assert first.shape == ((1, 6) if use_bim_mode else (4, 3))


@pytest.mark.parametrize(
    "arguments", [{"capacity": 0}, {"capacity": 8, "num_branches": 0}, {"capacity": 8, "device": "x"}]
)
def test_settings_that_cannot_be_are_refused(arguments):
    with pytest.raises(
        ValueError, match="|".join(("capacity must be", "num_branches must be", "device must be one of"))
    ):
        BranchStateManager(**arguments)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda: prefix_cache(3), "prefix_cache: 3 tokens in 1 rows, allowed are 4 in one"),
        (lambda: prefix_cache().repeated(2, 40), "prefix_cache: 4 tokens in 2 rows"),
        (lambda: prefix_cache(capacity=39), "prefix_cache: room for 39 tokens, allowed are at least 40"),
    ],
)
def test_a_cache_that_does_not_fit_the_prefix_is_refused(cache, message):
    manager = BranchStateManager(40, "cpu", True)
    with pytest.raises(ValueError, match=message):
        manager.init_prefix(4, cache())
    assert manager.prefix_len == 0 and manager.cache is None


@pytest.mark.parametrize(
    ("use_bim_mode", "names"), [(False, ["bim", "position_ids", "current_length"]), (True, ["alignment_manager"])]
)
def test_a_mode_has_no_state_of_the_other_one(use_bim_mode, names):
    manager = manager_of_three(use_bim_mode)
    for name in names:
        with pytest.raises(AttributeError, match=f"{name}: "):
            getattr(manager, name)

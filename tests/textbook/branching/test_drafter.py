"""Trees of all branches in one sequence are those of each branch alone, of NumPy, and of either mode."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.textbook.branching import BranchStateManager, CachedForward, DrafterBIM, DraftTrees, ModelKVCache
from tests.builders import model_config, random_model, random_prompts
from tests.oracle import next_token_logits

TOP_K, DEPTH, NODES, CAPACITY = 3, 3, 9, 128
CLOSE = 1e-4
PREFIX = random_prompts([6])[0]
PROMPTS = random_prompts([3, 1, 4], seed=1)

type Paths = dict[tuple[int, ...], float]


@cache
def random_decoder() -> DecoderLM:
    return random_model(model_config(), seed=5)


@cache
def the_model() -> CachedForward:
    return CachedForward(random_decoder())


@cache
def log_probs(ids: tuple[int, ...]) -> np.ndarray:
    """float32 [vocab], from the whole sequence without a cache."""
    logits = next_token_logits(random_decoder(), ids, prompt_len=1)
    return logits - np.logaddexp.reduce(logits)


def tree_of(sequence: list[int]) -> Paths:
    """The tree after a sequence, as EAGLE-2 chooses it, with the log-probability of each path."""
    frontier: Paths = {(): 0.0}
    pool: Paths = {}
    for _ in range(DEPTH):
        children: Paths = {}
        for path, score in frontier.items():
            each = log_probs((*sequence, *path))
            for token in np.argsort(-each, kind="stable")[:TOP_K].tolist():
                children[(*path, token)] = score + float(each[token])
        pool |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:TOP_K])
    return dict(sorted(pool.items(), key=lambda item: -item[1])[:NODES])


def paths_of(trees: DraftTrees, row: int) -> Paths:
    tokens, parents, scores = (np.asarray(x)[row] for x in (trees.draft_tokens, trees.tree_structure, trees.scores))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, scores.tolist(), strict=True))


def differ(got: Paths, wanted: Paths) -> bool:
    return got.keys() != wanted.keys() or any(abs(got[path] - wanted[path]) > CLOSE for path in wanted)


def manager_of(use_bim_mode: bool, prompts: list[list[int]] = PROMPTS) -> BranchStateManager:
    manager = BranchStateManager(CAPACITY, None, use_bim_mode, num_branches=5)
    manager.init_prefix(len(PREFIX))
    for branch, prompt in enumerate(prompts):
        manager.add_branch(branch, prompt)
    return manager


def drafter_of(prefix: list[int] = PREFIX, **options) -> DrafterBIM:
    settings = {"top_k": TOP_K, "tree_depth": DEPTH, "total_tokens": NODES, "capacity": CAPACITY, **options}
    drafter = DrafterBIM(the_model(), **settings)
    drafter.prefill(prefix)
    return drafter


def own(manager: BranchStateManager, branch: int) -> list[int]:
    return [*PREFIX, *manager.branch_outputs[branch]]


@pytest.mark.parametrize("use_bim_mode", [True, False])
def test_each_branch_gets_the_tree_of_its_own_sequence_in_every_round(use_bim_mode):
    manager, drafter = manager_of(use_bim_mode), drafter_of()
    rounds = [
        lambda: None,
        lambda: manager.prepare_decode_inputs([2, 0, 1], [[7, 8], [], [9]]),
        lambda: manager.remove_branch(0),
        lambda: manager.prepare_continuous_inputs([1, 3], [[5], [1, 2, 3]], {4: [6, 6]}),
        lambda: manager.switch_mode(not use_bim_mode),
        lambda: manager.prepare_decode_inputs([0, 0, 1], [[], [], [4]]),
    ]
    for grow in rounds:
        grow()
        trees = drafter.generate_draft_tree(None, manager)
        assert trees.branch_ids == tuple(manager.active_branches)
        for row, branch in enumerate(trees.branch_ids):
            assert not differ(paths_of(trees, row), tree_of(own(manager, branch)))


def test_the_same_drafter_drafts_the_same_tree_for_a_branch_that_is_a_sequence_of_its_own():
    trees = drafter_of().generate_draft_tree(None, manager_of(True))
    for row, prompt in enumerate(PROMPTS):
        *before, tip = [*PREFIX, *prompt]
        alone = BranchStateManager(CAPACITY, None, True)
        alone.init_prefix(len(before))
        alone.add_branch(0, [tip])
        tree = drafter_of(before).generate_draft_tree(None, alone)
        assert np.array_equal(tree.draft_tokens[0], trees.draft_tokens[row])
        assert np.array_equal(tree.tree_structure[0], trees.tree_structure[row])
        assert np.array_equal(tree.position_ids[0], trees.position_ids[row])
        np.testing.assert_allclose(tree.scores[0], trees.scores[row], atol=CLOSE)


def test_five_branches_and_top_10_are_fifty_tokens_in_each_forward():
    forward = CachedForward(random_decoder())
    for use_bim_mode in (True, False):
        manager = manager_of(use_bim_mode, random_prompts([3, 1, 4, 2, 5], seed=2))
        drafter = DrafterBIM(forward, top_k=10, tree_depth=3, capacity=256)
        forward.shapes.clear()
        drafter.prefill(PREFIX)
        draft_tokens, tree_structure, tree_mask = drafter.generate_draft_tree(None, manager)
        assert draft_tokens.shape == tree_structure.shape == (5, 10 + 2 * 100) and tree_mask.shape == (5, 210, 210)
        assert forward.shapes == [(1, 6), (1, 15), (1, 50), (1, 50)]
        manager.prepare_decode_inputs([1] * 5, [[token] for token in range(5)])
        forward.shapes.clear()
        trees = drafter.generate_draft_tree(hidden_states=None, state_manager=manager)
        assert forward.shapes == [(1, 5), (1, 50), (1, 50)]  # the tips, then 5 branches x 10
        assert drafter.draft_kv_cache.current_length == 6 + 15 + 5
        assert trees.draft_bim.tolist() == np.repeat(range(5), 210).tolist()


def test_nodes_see_their_ancestors_and_are_one_deeper_than_their_parents():
    trees = drafter_of().generate_draft_tree(None, manager_of(True))
    tips = [len(PREFIX) + len(prompt) - 1 for prompt in PROMPTS]
    for row, tip in enumerate(tips):
        parents, mask = trees.tree_structure[row].tolist(), trees.tree_mask[row]
        for node, parent in enumerate(parents):
            expected = {node} | (set(np.flatnonzero(mask[parent]).tolist()) if parent >= 0 else set())
            assert parent < node and set(np.flatnonzero(mask[node]).tolist()) == expected
            assert trees.position_ids[row, node] == tip + len(expected)


def test_levels_leave_the_cache_with_the_tips_and_the_next_round_as_it_was():
    manager, drafter = manager_of(True), drafter_of()
    first = drafter.generate_draft_tree(None, manager)
    assert drafter.draft_kv_cache.current_length == manager.current_length == 14
    again = drafter.generate_draft_tree(None, manager)  # nothing was accepted: the tips are computed again
    assert drafter.draft_kv_cache.current_length == 14
    assert np.array_equal(first.draft_tokens, again.draft_tokens)


def test_a_tree_of_one_level_needs_no_further_forward():
    drafter, manager = drafter_of(tree_depth=1, total_tokens=None), manager_of(False)
    trees = drafter.generate_draft_tree(None, manager)
    for row, branch in enumerate(manager.active_branches):
        best = np.argsort(-log_probs(tuple(own(manager, branch))), kind="stable")[:TOP_K]
        assert trees.draft_tokens[row].tolist() == best.tolist() and (trees.tree_structure[row] == -1).all()


def test_a_cache_that_holds_the_prefix_already_needs_no_prefill():
    filled = drafter_of().draft_kv_cache
    drafter = DrafterBIM(the_model(), filled, TOP_K, DEPTH, NODES)
    trees, manager = drafter.generate_draft_tree(None, manager_of(True)), manager_of(True)
    assert not differ(paths_of(trees, 0), tree_of(own(manager, 0)))


def test_masks_have_the_sources_names_and_shapes():
    drafter, history = drafter_of(), np.array([-1, -1, 0, 1, 1, -2])
    root = drafter._build_expand_root_mask(query_bim=[0, 1], history_bim=history)
    assert (root == 0).astype(int).tolist() == [[[[1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]]]]
    structure = np.array([[True, False], [False, True]])
    grown = drafter._build_grow_tree_mask(query_bim=[0, 1], history_bim=history, tree_structure=structure)
    assert (grown == 0).astype(int).tolist() == [[[[1, 1, 1, 0, 0, 0, 1, 0], [1, 1, 0, 1, 1, 0, 0, 1]]]]


# Faults of the source's sketch, planted.


def no_earlier_levels(masks):
    """The history only, and oneself: levels above are not seen."""

    def grow(query_bim, history_bim, tree_structure):
        own_only, count = np.array(tree_structure), len(query_bim)
        own_only[:, : own_only.shape[1] - count] = False
        return masks(query_bim, history_bim, own_only)

    return grow


def all_branches(masks):
    def grow(query_bim, history_bim, tree_structure):
        return masks(query_bim, np.full(len(history_bim), -1), tree_structure)

    return grow


def all_siblings(masks):
    def grow(query_bim, history_bim, tree_structure):
        return masks(query_bim, history_bim, np.ones_like(tree_structure))

    return grow


@pytest.mark.parametrize("bug", [no_earlier_levels, all_branches, all_siblings])
def test_the_comparison_notices_a_planted(bug):
    manager, drafter = manager_of(True), drafter_of()
    drafter._build_grow_tree_mask = bug(drafter._build_grow_tree_mask)
    trees = drafter.generate_draft_tree(None, manager)
    assert any(differ(paths_of(trees, row), tree_of(own(manager, row))) for row in range(3))


def test_the_comparison_notices_accepted_tokens_whose_kv_is_missing():
    manager, drafter = manager_of(True), drafter_of()
    drafter.generate_draft_tree(None, manager)
    manager.prepare_decode_inputs([3, 0, 0], [[7, 8, 9], [], []])
    drafter._held = manager.one_sequence.token_ids.tolist()  # as if only tips were fed
    trees = drafter.generate_draft_tree(None, manager)
    assert differ(paths_of(trees, 0), tree_of(own(manager, 0)))


# Misuse.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be an integer of at least 1"),
        ({"top_k": 102}, "top_k: 102, allowed are 1 to 101"),
        ({"tree_depth": 0}, "tree_depth must be"),
        ({"total_tokens": 22}, "total_tokens: 22, allowed are None and 1 to 21"),
        ({"capacity": None}, "capacity: None"),
        ({"draft_kv_cache": ModelKVCache.allocate(model_config(), 8)}, "capacity: 128"),
        ({"capacity": None, "draft_kv_cache": ModelKVCache.allocate(model_config(), 8, batch_size=2)}, "2 rows"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DrafterBIM(the_model(), **{"top_k": TOP_K, "tree_depth": DEPTH, "capacity": CAPACITY, **options})


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (
            lambda drafter: drafter.generate_draft_tree(np.zeros((1, 3, 8)), manager_of(True)),
            "hidden_states: shape .*, allowed is None, because",
        ),
        (lambda drafter: drafter.generate_draft_tree(None, manager_of(True, [])), "no active branch"),
        (lambda drafter: drafter.prefill([1]), "draft_kv_cache: it holds 6 tokens, allowed are none"),
        (lambda drafter: drafter.generate_draft_tree(None, manager_of(True, [[1] * 117])), "128 slots, but 129"),
    ],
)
def test_a_misuse_is_refused_by_name(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse(drafter_of())


def test_a_prefix_that_was_not_computed_and_another_manager_are_refused():
    with pytest.raises(ValueError, match="it holds 0 tokens, allowed are those of the prefix, 6; `prefill`"):
        DrafterBIM(the_model(), capacity=256).generate_draft_tree(None, manager_of(True))
    drafter = drafter_of()
    drafter.generate_draft_tree(None, manager_of(True))
    with pytest.raises(ValueError, match="state_manager: it holds other tokens than the draft_kv_cache"):
        drafter.generate_draft_tree(None, manager_of(True, PROMPTS[::-1]))

"""An EAGLE-3 head drafts for all branches in one sequence the trees that NumPy drafts for each of them alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.textbook.branching import BranchStateManager, DrafterBIM, DraftTrees, Eagle3Forward
from tests.builders import random_prompts
from tests.speculative import eagle3_numpy
from tests.speculative.decoder_numpy import capture_layers, forward, random_target
from tests.speculative.eagle3_files import load_target_and_head

VOCAB, TOP_K, DEPTH, NODES, CAPACITY, CLOSE = 61, 3, 3, 12, 128, 1e-4
PREFIX, *PROMPTS = random_prompts([6, 3, 1, 4], vocab_size=VOCAB)


@pytest.fixture(scope="module", params=[False, True], ids=["the target's embeddings", "its own"])
def checkpoints(request):
    rng = np.random.default_rng(7)
    target = random_target(rng, qk_norm=True, vocab_size=VOCAB)
    head = eagle3_numpy.random_head(rng, target.config, draft_vocab_size=40, own_embedding=request.param)
    return target, head


@pytest.fixture(scope="module")
def head_forward(checkpoints, tmp_path_factory) -> Eagle3Forward:
    folder: Path = tmp_path_factory.mktemp("head")
    model, head = load_target_and_head(folder, checkpoints)
    return Eagle3Forward(head, model)


def features_of(target, manager: BranchStateManager) -> np.ndarray:
    """[1, S, num_features]: the target's, of every branch; noise where a tip was not computed yet."""
    sequence = manager.one_sequence
    layers = capture_layers(target.config["num_hidden_layers"])
    found = 9 * np.random.default_rng(1).standard_normal((len(sequence), 3 * target.config["hidden_size"]))
    found[: len(PREFIX)] = forward(target, PREFIX, layers).features
    for branch in manager.active_branches:
        own = sequence.indices_of(branch)[:-1]
        computed = forward(target, [*PREFIX, *manager.branch_outputs[branch][:-1]], layers).features
        found[own] = computed[len(PREFIX) :]
    return found[None].astype(np.float32)


def paths_of(trees: DraftTrees, row: int) -> dict[tuple[int, ...], float]:
    tokens, parents, scores = (np.asarray(x)[row] for x in (trees.draft_tokens, trees.tree_structure, trees.scores))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, scores.tolist(), strict=True))


def manager_of(use_bim_mode: bool) -> BranchStateManager:
    manager = BranchStateManager(CAPACITY, None, use_bim_mode, num_branches=4)
    manager.init_prefix(len(PREFIX))
    for branch, prompt in enumerate(PROMPTS):
        manager.add_branch(branch, prompt)
    return manager


def drafter_of(head_forward: Eagle3Forward, manager: BranchStateManager, target) -> DrafterBIM:
    drafter = DrafterBIM(head_forward, None, TOP_K, DEPTH, NODES, capacity=CAPACITY)
    drafter.prefill(PREFIX, features_of(target, manager)[:, : len(PREFIX)])
    return drafter


def all_right(trees: DraftTrees, checkpoints, manager: BranchStateManager) -> bool:
    target, head = checkpoints
    right = True
    for row, branch in enumerate(trees.branch_ids):
        wanted = eagle3_numpy.draft_tree(
            head, target, [*PREFIX, *manager.branch_outputs[branch]], depth=DEPTH - 1, top_k=TOP_K, num_nodes=NODES
        ).paths()
        got = paths_of(trees, row)
        right &= got.keys() == wanted.keys() and all(abs(got[path] - wanted[path]) < CLOSE for path in wanted)
    return right


@pytest.mark.parametrize("use_bim_mode", [True, False])
def test_each_branch_gets_the_tree_of_its_own_sequence_in_every_round(use_bim_mode, checkpoints, head_forward):
    manager = manager_of(use_bim_mode)
    drafter = drafter_of(head_forward, manager, checkpoints[0])
    rounds = [
        lambda: None,
        lambda: manager.prepare_decode_inputs([2, 0, 1], [[7, 8], [], [9]]),
        lambda: manager.remove_branch(0),
        lambda: manager.prepare_continuous_inputs([1, 3], [[5], [1, 2, 3]], {4: [6, 6]}),
    ]
    for grow in rounds:
        grow()
        trees = drafter.generate_draft_tree(features_of(checkpoints[0], manager), manager)
        assert all_right(trees, checkpoints, manager)
    assert drafter.draft_kv_cache.current_length == len(manager.one_sequence)


def shifted(features: np.ndarray) -> np.ndarray:
    return np.roll(features, 1, axis=1)


def without_one_token(features: np.ndarray) -> np.ndarray:
    return np.where(np.arange(features.shape[1])[:, None] == 7, 0, features)  # of the first branch


@pytest.mark.parametrize("bug", [shifted, without_one_token])
def test_the_comparison_notices_features_that_are(bug, checkpoints, head_forward):
    manager = manager_of(True)
    drafter = drafter_of(head_forward, manager, checkpoints[0])
    trees = drafter.generate_draft_tree(bug(features_of(checkpoints[0], manager)), manager)
    assert not all_right(trees, checkpoints, manager)


def test_features_of_another_shape_are_refused(checkpoints, head_forward):
    manager = manager_of(True)
    drafter = drafter_of(head_forward, manager, checkpoints[0])
    wanted = rf"allowed is the shape \(1, 14, {head_forward.num_features}\)"
    with pytest.raises(ValueError, match=f"hidden_states: None, {wanted}"):
        drafter.generate_draft_tree(None, manager)
    with pytest.raises(ValueError, match=f"hidden_states: shape .*, {wanted}"):
        drafter.generate_draft_tree(features_of(checkpoints[0], manager)[:, :-1], manager)


def test_a_head_needs_a_token_before_the_branches(head_forward):
    manager = BranchStateManager(8, None, True)
    manager.add_branch(0, [1, 2])
    drafter = DrafterBIM(head_forward, top_k=2, tree_depth=1, capacity=8)
    with pytest.raises(ValueError, match="state_manager: prefix_len is 0, allowed with an EAGLE-3 head"):
        drafter.generate_draft_tree(np.zeros((1, 2, head_forward.num_features), np.float32), manager)

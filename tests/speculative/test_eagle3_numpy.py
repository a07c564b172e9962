"""The NumPy reference for EAGLE-3 drafting: it agrees with what is said of trees, and notices each planted mistake."""

import json
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.attention.dense import CausalAttend
from jaxinfer.checkpoint import load_checkpoint
from tests import oracle
from tests.speculative.decoder_numpy import (
    Checkpoint,
    attend,
    capture_layers,
    forward,
    gated_mlp,
    linear,
    log_softmax,
    project,
    random_target,
    rms_norm,
)
from tests.speculative.eagle3_numpy import BUGS, HARMLESS_BUGS, accepted, draft_tree, random_head
from tests.tolerances import tolerance

SIZES: dict[str, Any] = {"depth": 3, "top_k": 4, "num_nodes": 20}
WHOLE_POOL: dict[str, Any] = {"depth": 2, "top_k": 5, "num_nodes": 5 + 2 * 5 * 5}


def random_pair(seed, **head):
    rng = np.random.default_rng(seed)
    target = random_target(rng, qk_norm=seed % 2 == 1)
    return random_head(rng, target.config, **head), target


def random_tokens(seed, length=14):
    return np.random.default_rng(100 + seed).integers(0, 101, length).tolist()


def sine_noise(position, token_ids):
    """Something that differs with the position and the token, and is no Gumbel noise."""
    return 2 * np.sin(position * 7.3 + token_ids * 1.9)


def log_probs_after(head, target, tokens, path, noise=None):
    """The head's log-probabilities [draft vocab] after the root and a path: whole sequences through whole matrices."""
    config, tensors = head
    eps, base = config["rms_norm_eps"], "midlayer."
    table = tensors.get("embed_tokens.weight", target.tensors["model.embed_tokens.weight"])
    hidden = linear(tensors, "fc", forward(target, tokens[:-1]).features)
    for length in range(len(hidden), len(hidden) + len(path) + 1):
        ids, positions = [*tokens[1:], *path][:length], np.arange(length)
        normed = rms_norm(hidden, tensors[base + "hidden_norm.weight"], eps)
        words = rms_norm(table[ids].astype(float), tensors[base + "input_layernorm.weight"], eps)
        heads = project(config, tensors, base + "self_attn.", np.hstack([words, normed]), positions)
        seen = attend(*heads, np.tri(length, dtype=bool))
        x = hidden + linear(tensors, base + "self_attn.o_proj", seen)
        x = x + gated_mlp(tensors, base + "mlp.", rms_norm(x, tensors[base + "post_attention_layernorm.weight"], eps))
        hidden = np.vstack([hidden, x[-1]])
    logits = linear(tensors, "lm_head", rms_norm(hidden[-1], tensors["norm.weight"], eps))
    token_ids = np.arange(len(logits)) + tensors["d2t"]
    return log_softmax(logits if noise is None else logits + noise(len(tokens) + len(path), token_ids)), token_ids


def every_path(head, target, tokens, depth, noise=None, path=(), score=0.0):
    """The score of every path of up to `depth` tokens, no matter how unlikely."""
    if len(path) == depth:
        return {}
    found = {}
    for log_prob, token in zip(*log_probs_after(head, target, tokens, path, noise), strict=True):
        longer = (*path, int(token))
        found[longer] = score + log_prob
        found |= every_path(head, target, tokens, depth, noise, longer, score + log_prob)
    return found


def best_of(paths, count):
    return dict(sorted(paths.items(), key=lambda item: -item[1])[:count])


def assert_same_scores(paths, expected):
    assert paths.keys() == expected.keys()
    assert paths == pytest.approx(expected, abs=1e-9)


@pytest.fixture(scope="module", params=[False, True], ids=["llama, tied", "qwen3"])
def loaded(request, tmp_path_factory):
    """A random target, and the engine's model of the same weights, read from files."""
    target = random_target(np.random.default_rng(5), qk_norm=request.param, tie_word_embeddings=not request.param)
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(target.config))
    save_file(dict(target.tensors), folder / "model.safetensors")
    return target, load_checkpoint(folder)[1]


def test_the_decoder_gives_the_logits_of_the_engines_model(loaded):
    target, model = loaded
    tokens = random_tokens(0)
    for length in (1, 2, len(tokens)):
        logits = oracle.next_token_logits(model, tokens[:length])
        np.testing.assert_allclose(forward(target, tokens).logits[length - 1], logits, atol=tolerance(2e-4))


@pytest.mark.parametrize("capture", [None, (0, 7), (3,)])
def test_the_decoder_gives_the_features_of_the_engines_model(loaded, capture):
    target, model = loaded
    tokens = random_tokens(0)
    layers = capture_layers(8) if capture is None else capture

    @jax.jit
    def features(ids):
        return model.with_kv([None] * 8, ids, np.arange(len(tokens)), CausalAttend(), capture=layers).features

    found = forward(target, tokens, capture).features
    assert found.shape == (len(tokens), len(layers) * 48)
    np.testing.assert_allclose(found, features(np.array(tokens)), atol=tolerance(2e-4))


def test_captured_are_the_inputs_of_three_layers_that_differ():
    assert capture_layers(32) == (2, 16, 29)
    assert capture_layers(7) == (2, 3, 4)
    with pytest.raises(ValueError, match="6 layers are too few"):
        capture_layers(6)


@pytest.mark.parametrize("noise", [None, sine_noise])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_scores_are_sums_of_log_probabilities_along_paths(noise, own_embedding):
    head, target = random_pair(1, rope_theta=200.0, own_embedding=own_embedding)
    tokens = random_tokens(1)
    for path, score in draft_tree(head, target, tokens, **SIZES, noise=noise).paths().items():
        total = 0.0
        for length in range(len(path)):
            log_probs, token_ids = log_probs_after(head, target, tokens, path[:length], noise)
            total += log_probs[list(token_ids).index(path[length])]
        assert score == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_nodes", [1, 7, 20, 52])
def test_a_tree_has_as_many_nodes_as_asked_for_and_parents_before_children(seed, num_nodes):
    head, target = random_pair(seed)
    tree = draft_tree(head, target, random_tokens(seed), depth=3, top_k=4, num_nodes=num_nodes)
    assert len(tree.tokens) == len(tree.parents) == len(tree.scores) == len(tree.paths()) == num_nodes
    assert np.all((tree.parents >= -1) & (tree.parents < np.arange(num_nodes)))
    assert {path[:-1] for path in tree.paths()} <= {(), *tree.paths()}
    assert set(tree.tokens.tolist()) <= set((np.arange(40) + head.tensors["d2t"]).tolist())


def test_the_whole_pool_is_top_k_children_of_the_root_and_of_top_k_nodes_in_each_level():
    head, target = random_pair(2)
    tree = draft_tree(head, target, random_tokens(2), **WHOLE_POOL)
    assert Counter(map(len, tree.paths())) == {1: 5, 2: 25, 3: 25}
    assert tree.parents[:5].tolist() == [-1] * 5
    assert tree.parents[5:30].tolist() == np.repeat(range(5), 5).tolist()
    level = tree.scores[5:30]
    best = 5 + np.argsort(-level)[:5]
    assert tree.parents[30:].tolist() == np.repeat(best, 5).tolist()  # the best is expanded first
    assert all(np.all(np.diff(tree.scores[i : i + 5]) <= 0) for i in range(0, 55, 5))  # and its best child is first


@pytest.mark.parametrize("num_nodes", [1, 10, 30, 54])
def test_a_smaller_tree_is_the_best_of_the_pool_in_its_order(num_nodes):
    head, target = random_pair(2)
    pool = draft_tree(head, target, random_tokens(2), **WHOLE_POOL).paths()
    tree = draft_tree(head, target, random_tokens(2), **{**WHOLE_POOL, "num_nodes": num_nodes})
    best = best_of(pool, num_nodes)
    assert list(tree.paths().items()) == [item for item in pool.items() if item[0] in best]


@pytest.mark.parametrize("depth", range(5))
def test_nodes_lie_up_to_one_more_than_depth_below_the_root(depth):
    head, target = random_pair(0)
    tree = draft_tree(head, target, random_tokens(0), depth=depth, top_k=2, num_nodes=2 + 4 * depth)
    assert {len(path) for path in tree.paths()} == set(range(1, depth + 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [None, sine_noise])
def test_with_one_child_each_the_tree_is_what_greedy_drafting_draws(seed, noise):
    head, target = random_pair(seed)
    tokens = random_tokens(seed)
    tree = draft_tree(head, target, tokens, depth=4, top_k=1, num_nodes=5, noise=noise)
    path = ()
    for _ in range(5):
        log_probs, token_ids = log_probs_after(head, target, tokens, path, noise)
        path = (*path, int(token_ids[log_probs.argmax()]))
    assert tree.tokens.tolist() == list(path)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("noise", [None, sine_noise])
def test_no_more_nodes_than_children_are_the_best_of_all_paths_there_are(noise):
    head, target = random_pair(3, draft_vocab_size=6)
    tokens = random_tokens(3, length=6)
    tree = draft_tree(head, target, tokens, depth=3, top_k=4, num_nodes=4, noise=noise)
    assert_same_scores(tree.paths(), best_of(every_path(head, target, tokens, 4, noise), 4))


def test_a_tree_is_the_best_of_all_paths_whose_prefixes_are_among_the_best_of_their_level():
    head, target = random_pair(3, draft_vocab_size=6)
    tokens = random_tokens(3, length=6)
    every = every_path(head, target, tokens, 4)

    pool, parents = {}, {(): 0.0}
    for length in range(1, 5):
        level = {}
        for parent in parents:
            level |= best_of({p: s for p, s in every.items() if len(p) == length and p[:-1] == parent}, 3)
        pool |= level
        parents = best_of(level, 3)
    assert len(pool) == 3 + 3 * 9
    for num_nodes in (12, 30):
        tree = draft_tree(head, target, tokens, depth=3, top_k=3, num_nodes=num_nodes)
        assert_same_scores(tree.paths(), best_of(pool, num_nodes))


def test_equal_scores_go_to_the_lower_index_and_so_never_to_a_child_without_its_parent():
    head, target = random_pair(0, draft_vocab_size=4)
    even = Checkpoint(head.config, {**head.tensors, "lm_head.weight": np.zeros((4, 48), np.float32)})
    tree = draft_tree(even, target, random_tokens(0), depth=1, top_k=4, num_nodes=7)
    ids = (np.arange(4) + head.tensors["d2t"]).tolist()
    assert list(tree.paths()) == [*((token,) for token in ids), *((ids[0], token) for token in ids[:3])]
    certain = draft_tree(head, target, random_tokens(0), depth=5, top_k=2, num_nodes=6, noise=lambda _, ids: 1e6 * ids)
    assert certain.parents.tolist() == [-1, 0, 1, 2, 3, 4]  # all their scores are 0


def test_noise_is_asked_for_once_per_expanded_node_at_the_position_of_its_children():
    head, target = random_pair(0)
    asked = []

    def noise(position, token_ids):
        asked.append(position)
        np.testing.assert_array_equal(token_ids, np.arange(40) + head.tensors["d2t"])
        return np.zeros(len(token_ids))

    tokens = random_tokens(0)
    tree = draft_tree(head, target, tokens, **SIZES, noise=noise)
    assert Counter(asked) == {14: 1, 15: 4, 16: 4, 17: 4}
    assert tree.paths() == draft_tree(head, target, tokens, **SIZES).paths()


def test_a_feature_as_wide_as_the_head_does_not_go_through_fc():
    head, target = random_pair(0)
    without = Checkpoint(head.config, {name: value for name, value in head.tensors.items() if name != "fc.weight"})
    assert len(draft_tree(without, target, random_tokens(0), **SIZES, capture=(4,)).paths()) == 20


def test_accepted_is_the_path_that_the_target_chooses_and_its_next_token():
    head, target = random_pair(0)
    tree = draft_tree(head, target, random_tokens(0), **SIZES)
    leaf = max(tree.paths(), key=len)
    outside = next(token for token in range(101) if token not in tree.tokens)
    for length in range(len(leaf) + 1):
        chosen = [*leaf[:length], outside]
        assert accepted(tree, lambda path, chosen=chosen: chosen[len(path)]) == (leaf[:length], outside)


def test_accepted_by_a_target_that_always_agrees_is_a_path_to_a_leaf():
    head, target = random_pair(0)
    tree = draft_tree(head, target, random_tokens(0), depth=3, top_k=1, num_nodes=4)
    assert accepted(tree, lambda path: [*tree.tokens.tolist(), 7][len(path)]) == (tuple(tree.tokens.tolist()), 7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_the_paths_or_clearly_their_scores(bug, seed):
    head, target = random_pair(seed)
    tokens = random_tokens(seed)
    right = draft_tree(head, target, tokens, **SIZES).paths()
    wrong = draft_tree(head, target, tokens, **SIZES, bug=bug).paths()
    assert right.keys() != wrong.keys() or max(abs(right[path] - wrong[path]) for path in right) > 1e-2


@pytest.mark.parametrize("bug", HARMLESS_BUGS)
def test_a_bug_that_turns_all_positions_of_the_head_alike_changes_nothing(bug):
    head, target = random_pair(0)
    tokens = random_tokens(0)
    right, wrong = (draft_tree(head, target, tokens, **SIZES, bug=name).paths() for name in (None, bug))
    assert_same_scores(wrong, right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 53}, "num_nodes=53 of a pool of 52"),
        ({"top_k": 41}, "top_k=41 of a head that knows 40 tokens"),
        ({"bug": "none such"}, "none of"),
        ({"tokens": [3]}, "before the root there must be a token"),
    ],
)
def test_what_cannot_be_drafted_is_refused(change, message):
    head, target = random_pair(0)
    with pytest.raises(ValueError, match=message):
        draft_tree(head, target, **{"tokens": random_tokens(0), **SIZES, **change})


def test_random_checkpoints_are_float32_under_hugging_face_names():
    head, target = random_pair(0, own_embedding=True)
    drafted = np.arange(40) + head.tensors["d2t"]
    assert np.all(np.diff(head.tensors["d2t"]) >= 0) and np.all(np.diff(drafted) > 0) and drafted[-1] < 101
    np.testing.assert_array_equal(np.flatnonzero(head.tensors["t2d"]), drafted)
    weights = [value for name, value in {**head.tensors, **target.tensors}.items() if name.endswith("weight")]
    assert {value.dtype for value in weights} == {np.dtype(np.float32)}

"""Draft trees as arrays, against the same in plain Python: which nodes are kept, what each sees, where one walks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.speculative.tails import num_words, one_bit
from jaxinfer.speculative.tree import ROOT, Tree, accepted_path, ancestor_bits, best_of_pool, no_tree, pool_size

TOP_K, LEVELS, NODES, VOCAB = 3, 2, 9, 6
DEPTH = LEVELS + 1
POOL = pool_size(LEVELS, TOP_K)


class Pool:
    """A pool as a drafter makes it: scores fall along paths, levels continue the best nodes of the level before."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, VOCAB, POOL)
        self.scores = np.zeros(POOL, np.float32)
        self.parents = np.full(POOL, ROOT)
        # Few values, so that there are ties.
        steps = -rng.integers(0, 4, POOL).astype(np.float32)
        self.scores[:TOP_K] = np.sort(steps[:TOP_K])[::-1]
        frontier = np.arange(TOP_K)
        self.frontiers = np.zeros((LEVELS, TOP_K), np.int64)
        for level in range(LEVELS):
            self.frontiers[level] = frontier
            children = TOP_K + level * TOP_K**2 + np.arange(TOP_K**2)
            self.parents[children] = np.repeat(frontier, TOP_K)
            self.scores[children] = self.scores[self.parents[children]] + steps[children]
            frontier = children[np.argsort(-self.scores[children], kind="stable")[:TOP_K]]

    def depth(self, node: int) -> int:
        return 0 if node == ROOT else 1 + self.depth(int(self.parents[node]))

    def best(self, number: int, wanted: int) -> list[int]:
        chosen = sorted(np.argsort(-self.scores, kind="stable")[:number].tolist())
        return [node for node in chosen if self.depth(node) <= wanted]


def tree_of(pool: Pool, wanted: int = DEPTH, number: int = NODES) -> Tree:
    return best_of_pool(
        jnp.asarray(pool.tokens)[None], jnp.asarray(pool.scores)[None], jnp.asarray(pool.frontiers)[None],
        num_nodes=number, wanted=jnp.asarray([wanted]), entropy=jnp.zeros(1),
    )  # fmt: skip


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """The path of each node of the tree: the places of its ancestors and its own."""
    paths: list[tuple[int, ...]] = []
    for place, parent in enumerate(np.asarray(tree.parent)[0].tolist()):
        paths.append((*(() if parent == ROOT else paths[parent]), place))
    return paths


@given(st.integers(0, 10**6), st.integers(1, DEPTH), st.sampled_from([1, 5, NODES, POOL]))
@settings(max_examples=80, deadline=None)
def test_the_best_nodes_of_a_pool_are_kept_with_their_ancestors(seed, wanted, number):
    pool = Pool(seed)
    tree = tree_of(pool, wanted, number)
    kept = pool.best(number, wanted)
    there = np.asarray(tree.there)[0]
    assert np.asarray(tree.tokens)[0][there].tolist() == pool.tokens[kept].tolist()
    np.testing.assert_array_equal(np.asarray(tree.score)[0][there], pool.scores[kept])
    assert np.asarray(tree.depth)[0][there].tolist() == [pool.depth(node) for node in kept]
    everyone = sorted(np.argsort(-pool.scores, kind="stable")[:number].tolist())
    parents = [int(pool.parents[node]) for node in everyone]
    assert np.asarray(tree.parent)[0].tolist() == [ROOT if p == ROOT else everyone.index(p) for p in parents]
    assert int(tree.count[0]) == max(map(pool.depth, kept), default=0)


@given(st.integers(0, 10**6), st.sampled_from([0, 5, 40]))
@settings(max_examples=40, deadline=None)
def test_a_node_sees_itself_and_its_ancestors(seed, first):
    tree = tree_of(Pool(seed))
    words = num_words(first + NODES)
    got = np.asarray(ancestor_bits(tree, jnp.asarray([first]), max_depth=DEPTH, words=words))[0]
    for place, path in enumerate(paths_of(tree)):
        bits = {bit for bit in range(32 * words) if got[place, bit // 32] >> (bit % 32) & 1}
        assert bits == {first + node for node in path}


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.booleans())
@settings(max_examples=120, deadline=None)
def test_the_way_down_follows_what_was_sampled(seed, other, follows):
    """Sampled tokens are anything, or those of a path."""
    tree = tree_of(Pool(seed), wanted=1 + other % DEPTH)
    tokens, parents = np.asarray(tree.tokens)[0], np.asarray(tree.parent)[0]
    there = np.asarray(tree.there)[0]
    sampled = np.random.default_rng(other).integers(0, VOCAB, 1 + NODES)
    if follows:
        for place in range(NODES):
            sampled[parents[place] + 1] = tokens[place]
    # Siblings differ in what a drafter makes; here the first of equal ones stands for all.
    place, wanted = ROOT, []
    while True:
        children = [n for n in range(NODES) if parents[n] == place and there[n] and tokens[n] == sampled[place + 1]]
        if len(children) != 1:
            break
        place = children[0]
        wanted.append(place)
    ambiguous = len(children) > 1
    path, count = accepted_path(tree, jnp.asarray(sampled)[None], max_depth=DEPTH)
    got = np.asarray(path)[0].tolist()
    if not ambiguous:
        assert got == wanted + [-1] * (DEPTH - len(wanted)) and int(count[0]) == len(wanted)


def test_no_tree_has_no_node():
    tree = no_tree(2, NODES)
    assert not np.asarray(tree.there).any() and np.asarray(tree.count).tolist() == [0, 0]
    path, count = accepted_path(tree, jnp.zeros((2, 1 + NODES), jnp.int32), max_depth=DEPTH)
    assert (np.asarray(path) == -1).all() and (np.asarray(count) == 0).all()


def test_one_bit():
    got = np.asarray(one_bit(jnp.asarray([0, 31, 32, 63, 64, -1]), 2))
    assert got.tolist() == [[1, 0], [2**31, 0], [0, 1], [0, 2**31], [0, 0], [0, 0]]

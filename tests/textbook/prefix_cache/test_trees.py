"""The trees of the source's section 2, by their numbers."""

import time

import pytest

from jaxinfer.cache.radix_tree import RadixTree as EngineTree
from jaxinfer.textbook.prefix_cache import RadixNode, RadixTree

FIRST, SECOND, THIRD = [1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 8, 9, 10]


def make_tree(*sequences: list[int], step: int = 10) -> RadixTree:
    """A tree whose sequences start at 0, `step`, 2 `step`, ... of the buffer."""
    tree = RadixTree()
    for index, sequence in enumerate(sequences):
        tree.insert(sequence, index * step, len(sequence))
    return tree


def child(node: RadixNode, *labels: int) -> RadixNode:
    for label in labels:
        node = node.children[label]
    return node


def test_an_empty_tree_is_a_root():
    tree = RadixTree()
    assert (tree.root.prefix_length, tree.root.is_leaf(), tree.root.is_terminal) == (0, True, False)
    assert tree.dump() == "ROOT\n"
    assert tree.get_stats() == RadixTree.Stats(total_nodes=1)


def test_a_first_sequence_is_one_edge():
    assert make_tree(FIRST).dump() == "ROOT\n  Edge[1,2,3,4,5] *KV(pos=0,len=5,ref=0)\n"


def test_a_second_sequence_splits_the_edge_at_the_shared_prefix():
    tree = make_tree(FIRST, SECOND)
    assert tree.dump() == (
        "ROOT\n  Edge[1,2,3]\n    Edge[4,5] *KV(pos=0,len=5,ref=0)\n    Edge[6,7] *KV(pos=10,len=5,ref=0)\n"
    )
    assert tree.get_stats() == RadixTree.Stats(
        total_nodes=1 + 3, terminal_nodes=2, total_cached_tokens=10, max_depth=2
    )  # the source's three nodes, and the root


def test_a_third_sequence_splits_the_shared_prefix():
    tree = make_tree(FIRST, SECOND, THIRD)
    assert tree.dump() == (
        "ROOT\n"
        "  Edge[1,2]\n"
        "    Edge[3]\n"
        "      Edge[4,5] *KV(pos=0,len=5,ref=0)\n"
        "      Edge[6,7] *KV(pos=10,len=5,ref=0)\n"
        "    Edge[8,9,10] *KV(pos=20,len=5,ref=0)\n"
    )
    lengths = {labels: child(tree.root, *labels).prefix_length for labels in ((1,), (1, 3), (1, 3, 4), (1, 8))}
    assert lengths == {(1,): 2, (1, 3): 3, (1, 3, 4): 5, (1, 8): 5}
    assert child(tree.root, 1, 3, 6).parent is child(tree.root, 1, 3)
    assert [child(tree.root, 1, 3).is_leaf(), child(tree.root, 1, 8).is_leaf()] == [False, True]


def test_the_drawing_of_the_source_has_its_form():
    # The source draws len=5 for [8,9,10], which has 3 tokens.
    assert make_tree(FIRST, SECOND, [8, 9, 10]).dump() == (
        "ROOT\n"
        "  Edge[1,2,3]\n"
        "    Edge[4,5] *KV(pos=0,len=5,ref=0)\n"
        "    Edge[6,7] *KV(pos=10,len=5,ref=0)\n"
        "  Edge[8,9,10] *KV(pos=20,len=3,ref=0)\n"
    )


def test_a_long_edge_is_drawn_with_its_first_five_tokens():
    tree = make_tree([151644, 8948, 198, *range(2000, 2066)])
    assert tree.dump() == "ROOT\n  Edge[151644,8948,198,2000,2001...+64] *KV(pos=0,len=69,ref=0)\n"


@pytest.mark.parametrize(
    ("tokens", "matched_length", "kv_cache_pos"),
    [([1, 2, 3, 4, 5, 6, 7], 5, 0), ([1, 2, 3, 6, 7], 5, 10), ([1, 2, 8, 9, 10, 100], 5, 20)],
)
def test_the_longest_cached_sequence_is_found(tokens, matched_length, kv_cache_pos):
    tree = make_tree(FIRST, SECOND, THIRD)
    found = tree.find_longest_prefix(tokens)
    assert (found.matched_length, found.kv_cache_pos, found.has_kv_cache()) == (matched_length, kv_cache_pos, True)
    assert found.matched_node.is_terminal and found.matched_node.prefix_length == matched_length
    assert tree.contains(tokens[:5])


def test_a_prefix_that_ends_no_sequence_is_followed_but_not_reused():
    tree = make_tree(FIRST, SECOND, THIRD)
    found = tree.find_longest_prefix([1, 2, 3])
    assert (found.matched_length, found.kv_cache_pos, found.has_kv_cache()) == (3, -1, False)
    assert found.matched_node is child(tree.root, 1, 3) and found.edge_offset == 0
    assert not tree.contains([1, 2, 3])


def test_a_search_that_ends_inside_an_edge_says_how_far_it_got():
    tree = make_tree(FIRST)
    found = tree.find_longest_prefix([1, 2, 3])
    assert (found.matched_length, found.edge_offset, found.has_kv_cache()) == (3, 3, False)
    assert found.matched_node is tree.root


def test_an_unknown_sequence_and_an_empty_one_match_nothing():
    tree = make_tree(FIRST)
    for tokens in ([10, 20, 30], []):
        found = tree.find_longest_prefix(tokens)
        assert (found.matched_length, found.matched_node, found.has_kv_cache()) == (0, tree.root, False)
        assert not tree.contains(tokens)


def test_an_empty_sequence_makes_the_root_terminal_and_holds_nothing():
    tree = make_tree(FIRST)
    tree.insert([], 7, 0)
    assert tree.contains([]) and tree.total_cached_tokens == 5
    found = tree.find_longest_prefix([9])
    assert (found.matched_length, found.kv_cache_pos, found.has_kv_cache()) == (0, 7, False)
    assert tree.evict_lru(0) == 5 and tree.contains([])
    assert tree.remove([]) and not tree.contains([])


def test_a_sequence_that_is_inserted_again_moves_and_keeps_its_references():
    tree = make_tree(FIRST)
    assert tree.add_reference(FIRST)
    tree.insert(FIRST, 40, 5)
    info = child(tree.root, 1).kv_info
    assert (info.kv_start_pos, info.kv_length, info.ref_count, tree.total_cached_tokens) == (40, 5, 1, 5)


def test_only_a_cached_sequence_is_removed():
    tree = make_tree(FIRST, SECOND)
    assert [tree.remove(tokens) for tokens in ([1, 2, 3], [1, 2, 3, 4], [*FIRST, 6], [])] == [False] * 4
    assert tree.remove(FIRST) and not tree.remove(FIRST)
    assert not tree.find_longest_prefix(FIRST).has_kv_cache()
    assert (tree.total_cached_tokens, tree.contains(SECOND)) == (5, True)


def test_edges_are_joined_again_after_their_branch_is_gone():
    tree = make_tree(FIRST, SECOND, THIRD)
    assert tree.remove(FIRST)
    assert tree.dump() == (
        "ROOT\n  Edge[1,2]\n    Edge[3,6,7] *KV(pos=10,len=5,ref=0)\n    Edge[8,9,10] *KV(pos=20,len=5,ref=0)\n"
    )
    assert child(tree.root, 1, 3).parent is child(tree.root, 1)
    assert tree.remove(THIRD)
    assert tree.dump() == "ROOT\n  Edge[1,2,3,6,7] *KV(pos=10,len=5,ref=0)\n"
    assert tree.remove(SECOND)
    assert tree.dump() == "ROOT\n"


def test_a_removed_sequence_within_another_one_leaves_the_other():
    tree = make_tree(FIRST[:2], FIRST)
    assert tree.get_stats() == RadixTree.Stats(3, 2, 7, 2)
    assert tree.remove(FIRST[:2])
    assert tree.dump() == "ROOT\n  Edge[1,2,3,4,5] *KV(pos=10,len=5,ref=0)\n"


def test_the_least_recently_used_leaf_is_evicted_first():
    tree = make_tree(FIRST, SECOND, THIRD)
    assert tree.add_reference(FIRST) and tree.release_reference(FIRST)  # used after the others
    assert tree.evict_lru(15) == 0
    assert tree.evict_lru(14) == 5
    assert [tree.contains(each) for each in (FIRST, SECOND, THIRD)] == [True, False, True]
    assert tree.evict_lru(5) == 5
    assert [tree.contains(each) for each in (FIRST, SECOND, THIRD)] == [True, False, False]


def test_a_sequence_above_an_evicted_one_is_evicted_after_it():
    tree = make_tree(list(range(69)), list(range(108)))
    assert tree.evict_lru(176) == 108  # the source frees no more than this, and keeps the node
    assert tree.dump().startswith("ROOT\n  Edge[0,1,2,3,4...+64] *KV") and tree.total_cached_tokens == 69
    tree.insert(list(range(108)), 0, 108)
    assert tree.evict_lru(0) == 177
    assert tree.get_stats() == RadixTree.Stats(total_nodes=1)


def test_references_are_counted_and_never_fall_below_zero():
    tree = make_tree(FIRST, SECOND)
    assert tree.add_reference(FIRST) and tree.add_reference(FIRST)
    assert "Edge[4,5] *KV(pos=0,len=5,ref=2)" in tree.dump()
    assert [tree.release_reference(FIRST) for _ in range(3)] == [True, True, False]
    assert child(tree.root, 1, 4).kv_info.ref_count == 0


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2], [1, 2, 3, 4], [*FIRST, 6], [9], []])
def test_what_is_not_cached_gets_no_reference(tokens):
    tree = make_tree(FIRST, SECOND)
    assert not tree.add_reference(tokens)
    assert not tree.release_reference(tokens)
    assert tree.root.kv_info.ref_count == child(tree.root, 1).kv_info.ref_count == 0
    assert tree.evict_lru(0) == 10


def test_times_of_access_are_milliseconds_and_no_two_are_equal():
    before = time.monotonic_ns() / 1e6
    tree = make_tree(*([index] for index in range(200)))
    times = [child(tree.root, index).kv_info.last_access_time for index in range(200)]
    assert before <= times[0] and times == sorted(set(times)) and len(times) == 200
    assert times[-1] <= time.monotonic_ns() / 1e6


def test_a_search_is_no_use():
    tree = make_tree(FIRST, SECOND)
    tree.find_longest_prefix(FIRST)
    tree.evict_lru(5)
    assert [tree.contains(FIRST), tree.contains(SECOND)] == [False, True]


def test_clear_leaves_a_root():
    tree = make_tree(FIRST, SECOND, THIRD)
    tree.clear()
    assert (tree.dump(), tree.total_cached_tokens) == ("ROOT\n", 0)


def test_a_tree_may_be_deeper_than_the_recursion_limit():
    tree = make_tree(*([0] * length for length in range(1, 1501)))
    assert tree.get_stats() == RadixTree.Stats(1501, 1500, 1500 * 1501 // 2, 1500)
    assert tree.dump().count("Edge[0] *KV") == 1500
    assert tree.evict_lru(0) == 1500 * 1501 // 2
    assert tree.get_stats().total_nodes == 1


def test_statistics_are_printed_as_by_the_source():
    assert RadixTree.Stats(42, 15, 45000, 8).to_string() == (
        "RadixTree Stats:\n  Total nodes: 42\n  Terminal nodes: 15\n  Max depth: 8\n  Cached tokens: 45000\n"
    )


def test_the_engines_tree_reuses_what_this_one_only_follows():
    tree, engine = make_tree(FIRST, SECOND, THIRD), EngineTree(1)
    for index, sequence in enumerate((FIRST, SECOND, THIRD)):
        engine.insert(sequence, range(10 * index, 10 * index + 5))
    assert tree.find_longest_prefix([1, 2, 3, 99]).kv_cache_pos == -1
    assert engine.match([1, 2, 3, 99]).pages == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tree: tree.insert([1, 2], -1, 2), "kv_start_pos must be an integer of at least 0, got -1"),
        (lambda tree: tree.insert([1, 2], 0.5, 2), "kv_start_pos must be an integer of at least 0, got 0.5"),
        (lambda tree: tree.insert([1, 2], 0, 3), "kv_length must be the number of tokens, 2, got 3"),
        (lambda tree: tree.insert([1, 2], 0, 2.0), "kv_length must be an integer of at least 0, got 2.0"),
        (lambda tree: tree.insert([1, 2.0], 0, 2), "tokens must be integers, got 2.0"),
        (lambda tree: tree.find_longest_prefix([2**31]), "tokens must fit in 32 bits, got 2147483648"),
        (lambda tree: tree.evict_lru(-1), "max_tokens must be an integer of at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(call, message):
    tree = make_tree(FIRST)
    before = tree.dump()
    with pytest.raises(ValueError, match=message):
        call(tree)
    assert tree.dump() == before and tree.total_cached_tokens == 5

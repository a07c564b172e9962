"""The radix tree finds the longest prefix in whole pages, however its nodes are split, grown, joined and trimmed."""

import sys
from array import array

import pytest

from jaxinfer.cache.radix_node import RadixNode, page_key
from jaxinfer.cache.radix_tree import RadixTree
from jaxinfer.cache.radix_view import TreeStats, walk_tree


def make_tree(page_size: int = 1, *sequences: list[int]) -> RadixTree:
    """A tree of sequences whose pages are numbered in the order in which they came in."""
    tree, next_page = RadixTree(page_size), 0
    for tokens in sequences:
        count = len(tokens) // page_size
        tree.insert(tokens, range(next_page, next_page + count))
        next_page += count
    tree.check_integrity()
    return tree


def edges(tree: RadixTree) -> list[list[int]]:
    return sorted(node.token_ids for node in walk_tree(tree.root))


def node_at(tree: RadixTree, tokens: list[int]) -> RadixNode:
    return tree.match(tokens).node


def test_an_empty_tree_finds_nothing():
    tree = make_tree()
    assert tree.match([1, 2, 3]) == ([], tree.root)
    assert tree.num_pages == 0


def test_a_sequence_is_found_again_with_its_pages():
    tree = make_tree()
    tree.insert([1, 2, 3], [7, 5, 9])
    assert tree.match([1, 2, 3]).pages == [7, 5, 9]
    assert tree.match([1, 2, 3, 4]).pages == [7, 5, 9]


def test_a_match_that_ends_inside_an_edge_splits_it_there():
    tree = make_tree(1, [1, 2, 3, 4, 5])
    match = tree.match([1, 2, 3, 9])
    assert match.pages == [0, 1, 2]
    assert match.node.token_ids == [1, 2, 3]
    assert edges(tree) == [[1, 2, 3], [4, 5]]
    tree.check_integrity()


def test_only_whole_pages_match():
    tree = make_tree(4, [1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.match([1, 2, 3]).pages == []
    assert tree.match([1, 2, 3, 9]).pages == []
    assert tree.match([1, 2, 3, 4, 5, 6, 7]).pages == [0]
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 9]).pages == [0]
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).pages == [0, 1]


def test_siblings_may_share_tokens_of_their_first_page_but_not_all_of_it():
    tree = make_tree(4, [1, 2, 3, 4], [1, 2, 3, 5])
    assert edges(tree) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert tree.match([1, 2, 3, 5]).pages == [1]


def test_tokens_beyond_the_last_whole_page_are_not_inserted():
    tree = RadixTree(4)
    assert tree.insert([1, 2, 3, 4, 5, 6], [3]).pages == [3]
    assert edges(tree) == [[1, 2, 3, 4]]


def test_inserting_what_is_there_already_keeps_the_pages_of_the_tree():
    tree = make_tree(1, [1, 2, 3])
    inserted = tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
    assert inserted.num_present == 3
    assert inserted.pages == [0, 1, 2, 13]
    assert tree.match([1, 2, 3, 4]).pages == [0, 1, 2, 13]
    assert tree.num_pages == 4


def test_an_insertion_that_leaves_an_edge_in_the_middle_splits_it():
    tree = make_tree(1, [1, 2, 3, 4, 5], [1, 2, 3, 6, 7])
    assert edges(tree) == [[1, 2, 3], [4, 5], [6, 7]]
    assert tree.match([1, 2, 3, 6, 7]).pages == [0, 1, 2, 8, 9]
    tree.check_integrity()


def test_a_split_keeps_locks_history_and_sums():
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3], priority=5)
    node = node_at(tree, [1, 2, 3, 4])
    tree.lock(node)
    history = (node.hits, node.created, node.priority)
    tree.insert([1, 2, 9], [4, 5, 6])
    upper = node.parent
    assert upper is not None and upper.token_ids == [1, 2] and node.token_ids == [3, 4]
    assert (upper.hits, upper.created, upper.priority) == (node.hits, node.created, node.priority) == history
    assert upper.locks == node.locks == 1
    assert (tree.num_protected, tree.num_evictable) == (4, 1)
    tree.check_integrity()


def test_namespaces_share_nothing():
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4], [0, 1])
    tree.insert([1, 2, 3, 4], [2, 3], "salt")
    tree.insert([1, 2, 3, 4], [4, 5], ("adapter", 7))
    assert tree.match([1, 2, 3, 4]).pages == [0, 1]
    assert tree.match([1, 2, 3, 4], "salt").pages == [2, 3]
    assert tree.match([1, 2, 3, 4], ("adapter", 7)).pages == [4, 5]
    assert tree.match([1, 2, 3, 4], "pepper").pages == []
    tree.check_integrity()


def test_a_prepared_key_says_the_same_as_the_tokens():
    tree = make_tree(2, [1, 2, 3, 4])
    assert tree.match(page_key([1, 2, 3, 4])).pages == tree.match([1, 2, 3, 4]).pages == [0, 1]
    assert page_key(page_key([1, -2])) == page_key([1, -2]) == array("i", [1, -2]).tobytes()


def test_a_key_that_ends_inside_a_token_is_refused():
    with pytest.raises(ValueError, match="a key must have a multiple of 4 bytes, got 6"):
        page_key(b"abcdef")


def test_a_token_id_of_more_than_32_bits_is_refused():
    with pytest.raises(ValueError, match=f"token_ids must fit in 32 bits, got one up to {2**31}"):
        page_key([1, 2**31, 5])


@pytest.mark.parametrize("count", [1, 3])
def test_an_insertion_needs_a_page_for_every_page_of_tokens(count):
    tree = RadixTree(2)
    with pytest.raises(ValueError, match=f"pages must be 2, one for every 2 of 5 tokens, got {count}"):
        tree.insert([1, 2, 3, 4, 5], range(count))
    assert tree.num_pages == 0 and tree.root.locks == 0


def test_a_tree_without_a_page_size_is_refused():
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        RadixTree(0)


def test_the_common_part_of_an_edge_is_found_wherever_it_ends():
    tokens = list(range(100, 164))
    for same in range(1, 17):
        tree = make_tree(4, tokens)
        other = tokens[: 4 * same] + [7] * (64 - 4 * same)
        assert tree.match(other).pages == list(range(same))
        tree.check_integrity()


def test_locks_reach_up_to_the_root_and_move_pages_between_evictable_and_protected():
    tree = make_tree(1, [1, 2, 3], [1, 2, 4])
    assert (tree.num_evictable, tree.num_protected) == (4, 0)
    node = node_at(tree, [1, 2, 3])
    tree.lock(node)
    assert (tree.num_evictable, tree.num_protected) == (1, 3)
    tree.lock(node)
    tree.unlock(node)
    assert (tree.num_evictable, tree.num_protected) == (1, 3)
    tree.unlock(node)
    assert (tree.num_evictable, tree.num_protected) == (4, 0)
    with pytest.raises(ValueError, match="node must be locked"):
        tree.unlock(node)
    tree.check_integrity()


def test_a_lock_stays_at_its_end_when_the_edge_is_split_above_it():
    tree = make_tree(1, [1, 2, 3, 4])
    node = node_at(tree, [1, 2, 3, 4])
    tree.lock(node)
    tree.match([1, 2, 9])
    assert tree.evict(4) == []
    tree.unlock(node)
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]


# Growing from a node: how running requests publish.


def start(tree: RadixTree, tokens: list[int]) -> RadixNode:
    """What a request does first: match, and lock what is found."""
    node = tree.match(tokens).node
    tree.lock(node)
    return node


def test_a_sequence_published_page_by_page_stays_one_node():
    tree = RadixTree(2)
    node = start(tree, [1, 2])
    for page in range(50):
        node = tree.extend(node, [page, page + 1], [page]).node
        tree.check_integrity()
    assert len(list(walk_tree(tree.root))) == 1
    assert (tree.num_protected, tree.num_evictable) == (50, 0)
    tree.unlock(node)
    assert (tree.num_protected, tree.num_evictable) == (0, 50)
    tree.check_integrity()


def test_a_conversation_that_goes_on_where_it_ended_stays_one_node():
    tree = make_tree(1, [1, 2, 3])
    node = start(tree, [1, 2, 3, 4, 5])
    node = tree.extend(node, [4, 5], [3, 4]).node
    tree.unlock(node)
    assert edges(tree) == [[1, 2, 3, 4, 5]]


def test_a_node_whose_end_another_one_has_locked_does_not_grow():
    tree = make_tree(1, [1, 2])
    mine, other = start(tree, [1, 2]), start(tree, [1, 2])
    mine = tree.extend(mine, [3], [2]).node
    assert edges(tree) == [[1, 2], [3]]
    assert (other.locks, mine.locks) == (2, 1)
    mine = tree.extend(mine, [4], [3]).node
    assert edges(tree) == [[1, 2], [3, 4]]
    tree.unlock(mine)
    assert (tree.num_protected, tree.num_evictable) == (2, 2)  # the other one never covered what came later
    assert sorted(tree.evict(10)) == [2, 3]
    tree.unlock(other)
    assert sorted(tree.evict(10)) == [0, 1]
    tree.check_integrity()


def test_two_that_go_different_ways_from_one_end_get_a_branch_each():
    tree = make_tree(1, [1, 2])
    mine, other = start(tree, [1, 2]), start(tree, [1, 2])
    mine = tree.extend(mine, [3], [2]).node
    other = tree.extend(other, [4], [3]).node
    mine = tree.extend(mine, [5], [4]).node
    other = tree.extend(other, [6], [5]).node
    assert edges(tree) == [[1, 2], [3, 5], [4, 6]]
    for node in (mine, other):
        tree.unlock(node)
    tree.check_integrity()


def test_one_that_follows_another_page_by_page_makes_no_chain_of_nodes():
    tree = RadixTree(1)
    ahead, behind = start(tree, [0]), start(tree, [0])
    ahead = tree.extend(ahead, range(20), range(20)).node
    for step in range(15):
        inserted = tree.extend(behind, [step], [100 + step])
        behind = inserted.node
        assert (inserted.num_present, inserted.pages) == (1, [step])
        assert len(list(walk_tree(tree.root))) == 2
        tree.check_integrity()
    tree.unlock(ahead)
    assert (tree.num_protected, tree.num_evictable) == (15, 5)
    assert tree.evict(20) == [15, 16, 17, 18, 19]
    tree.unlock(behind)
    assert tree.num_evictable == 15
    tree.check_integrity()


def test_an_end_that_another_one_has_locked_too_does_not_move():
    tree = make_tree(1, [1, 2])
    ahead, mine, other = (start(tree, [1, 2]) for _ in range(3))
    ahead = tree.extend(ahead, [3, 4, 5], [2, 3, 4]).node
    mine = tree.extend(mine, [3], [99]).node
    assert edges(tree) == [[1, 2], [3], [4, 5]]
    tree.unlock(mine)
    tree.unlock(ahead)
    assert sorted(tree.evict(9)) == [2, 3, 4]
    tree.unlock(other)
    assert tree.num_evictable == 2
    tree.check_integrity()


def test_one_that_catches_up_whole_ends_at_the_same_node():
    tree = RadixTree(1)
    ahead, behind = start(tree, [0]), start(tree, [0])
    ahead = tree.extend(ahead, [1, 2, 3], [0, 1, 2]).node
    behind = tree.extend(behind, [1], [10]).node
    behind = tree.extend(behind, [2, 3], [11, 12]).node
    assert behind is ahead and ahead.locks == 2
    tree.unlock(behind)
    tree.unlock(ahead)
    assert tree.num_evictable == 3 and tree.root.locks == 0
    tree.check_integrity()


def test_pages_that_nobody_has_locked_become_protected_when_a_lock_moves_over_them():
    tree = make_tree(1, [1, 2, 3, 4])
    node = start(tree, [1])
    inserted = tree.extend(node, [2, 3], [10, 11])
    assert inserted.pages == [1, 2] and inserted.node is node
    assert (tree.num_protected, tree.num_evictable) == (3, 1)
    tree.check_integrity()


def test_extending_by_nothing_changes_nothing():
    tree = make_tree(2, [1, 2])
    node = start(tree, [1, 2])
    assert tree.extend(node, [3], []) == (0, [], node)
    assert tree.num_pages == 1


def test_extending_from_a_node_without_a_lock_is_refused():
    tree = make_tree(1, [1])
    with pytest.raises(ValueError, match="node must be locked by the caller"):
        tree.extend(node_at(tree, [1]), [2], [1])
    assert tree.num_pages == 1


# Taking out.


def test_remove_takes_what_no_other_sequence_continues():
    tree = make_tree(1, [1, 2, 3, 4], [1, 2, 5])
    assert sorted(tree.remove([1, 2, 3, 4])) == [2, 3]
    assert tree.match([1, 2, 3, 4]).pages == [0, 1]
    assert sorted(tree.remove([1, 2, 5])) == [0, 1, 6]
    assert tree.num_pages == 0
    tree.check_integrity()


def test_remove_of_a_stem_or_of_something_unknown_takes_nothing():
    tree = make_tree(1, [1, 2, 3])
    assert tree.remove([1, 2]) == []
    assert tree.remove([9]) == []
    assert tree.remove([1, 2, 3], "other namespace") == []
    assert tree.num_pages == 3


def test_remove_leaves_what_is_locked():
    tree = make_tree(1, [1, 2, 3, 4])
    node = start(tree, [1, 2])
    assert tree.remove([1, 2, 3, 4]) == [2, 3]
    assert tree.remove([1, 2]) == []
    tree.unlock(node)
    assert tree.remove([1, 2]) == [0, 1]


def test_clear_takes_all_that_is_not_locked():
    tree = make_tree(1, [1, 2, 3], [1, 2, 4], [5, 6])
    node = start(tree, [1, 2])
    assert sorted(tree.clear()) == [2, 5, 6, 7]
    assert tree.match([1, 2, 3]).pages == [0, 1]
    assert (tree.num_protected, tree.num_evictable) == (2, 0)
    tree.check_integrity()
    tree.unlock(node)
    assert tree.clear() == [0, 1]
    assert edges(tree) == []


def test_a_drawn_tree_shows_branches_and_history():
    tree = make_tree(2, [1, 2, 3, 4, 5, 6], [1, 2, 9, 9])
    tree.insert([8, 8], [20], "salt")
    tree.lock(node_at(tree, [1, 2, 3, 4, 5, 6]))
    lines = tree.dump(lambda tokens: f"<{'-'.join(map(str, tokens))}>").splitlines()
    assert lines == [
        "root",
        "├─ 2 tokens · 1 page · 1 lock · 1 hit · age 0  <1-2>",
        "│  ├─ 4 tokens · 2 pages · 1 lock · 1 hit · age 0  <3-4-5-6>",
        "│  └─ 2 tokens · 1 page · 0 locks · 0 hits · age 3  <9-9>",
        "└─ 2 tokens · 1 page · 0 locks · 0 hits · age 1 · namespace 'salt'  <8-8>",
    ]
    assert make_tree().dump() == "root (empty)"


def test_a_path_deeper_than_the_recursion_limit_is_no_trouble():
    depth = sys.getrecursionlimit() + 100
    tree = RadixTree(1)
    node = start(tree, [])
    for token in range(depth):
        tree.lock(node)  # so that each gets a node of its own
        node = tree.extend(node, [token], [token]).node
    assert len(tree.dump().splitlines()) == depth + 1
    assert tree.get_stats() == TreeStats(depth, 1, depth, depth, depth, depth)
    assert tree.match(range(depth)).pages == list(range(depth))
    tree.check_integrity()
    assert tree.path_key(node) == page_key(range(depth))


def test_the_size_of_a_tree_is_counted_without_its_root():
    assert make_tree().get_stats() == TreeStats(0, 0, 0, 0, 0, 0)
    tree = make_tree(1, [1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 8, 9, 10])
    assert tree.get_stats() == TreeStats(
        num_nodes=5, num_leaves=3, depth=3, num_tokens=10, num_pages=10, num_locked_pages=0
    )
    tree.lock(node_at(tree, [1, 2, 3, 6, 7]))
    assert tree.get_stats().num_locked_pages == tree.num_protected == 5
    assert tree.evict(1) and tree.get_stats().num_pages == tree.num_pages == 9

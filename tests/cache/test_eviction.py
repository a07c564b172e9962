"""Eviction takes the ends of unlocked sequences, in the order of the policy, and no more than asked."""

import random

import pytest

from jaxinfer.cache.eviction import FIFO, LFU, LRU, EvictionPolicy, Priority, make_eviction_policy
from jaxinfer.cache.radix_tree import RadixTree


def make_tree(policy: EvictionPolicy, **priorities: int) -> RadixTree:
    """Sequences a, b, c, d: two pages of one token each; pages 0 and 1, 10 and 11, 20 and 21, 30 and 31."""
    tree = RadixTree(1, policy)
    for index, name in enumerate("abcd"):
        tree.insert([index, 100], [10 * index, 10 * index + 1], priority=priorities.get(name, 0))
    return tree


def use(tree: RadixTree, *names: str) -> None:
    for name in names:
        tree.match(["abcd".index(name), 100])


def order(tree: RadixTree) -> str:
    """The sequences in the order in which they go."""
    freed = []
    while pages := tree.evict(2):
        freed.append("abcd"[pages[0] // 10])
        tree.check_integrity()
    return "".join(freed)


def test_lru_takes_the_least_recently_used():
    tree = make_tree(LRU())
    use(tree, "b", "a")
    assert order(tree) == "cdba"


def test_lru_counts_the_end_of_a_use_and_not_only_its_beginning():
    tree = make_tree(LRU())
    node = tree.match([0, 100]).node
    tree.lock(node)
    use(tree, "b", "c", "d")
    tree.unlock(node)
    assert order(tree) == "bcda"


def test_lfu_takes_the_least_often_matched_and_of_equals_the_least_recent():
    tree = make_tree(LFU())
    use(tree, "a", "a", "a", "d", "d", "c", "b", "c")
    assert order(tree) == "bdca"


def test_fifo_takes_the_oldest_whatever_is_used():
    tree = make_tree(FIFO())
    use(tree, "a", "a", "c")
    assert order(tree) == "abcd"


def test_priority_takes_the_lowest_and_of_equals_the_least_recent():
    tree = make_tree(Priority(), a=1, c=2)
    use(tree, "b", "b")
    assert order(tree) == "dbac"


def test_a_stem_has_the_highest_priority_of_what_went_through_it():
    tree = RadixTree(1, Priority())
    tree.insert([1, 2], [0, 1], priority=1)
    tree.insert([1, 3], [2, 3], priority=7)
    tree.insert([5], [4], priority=3)
    tree.insert([1, 3], [5, 6], priority=0)  # does not lower it
    assert tree.evict(1) == [1]
    assert tree.evict(1) == [4]
    assert tree.evict(2) == [3, 0]
    tree.check_integrity()


def test_a_parent_goes_after_its_last_child():
    tree = RadixTree(1)
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.insert([1, 2, 4], [3, 4, 5])
    assert tree.evict(1) == [2]
    assert tree.evict(1) == [5]
    assert sorted(tree.evict(5)) == [0, 1]


def test_a_node_is_trimmed_from_its_end_when_less_is_wanted():
    tree = RadixTree(2)
    tree.insert(range(10), range(5))
    assert tree.evict(2) == [3, 4]
    assert tree.match(range(10)).pages == [0, 1, 2]
    assert tree.evict(1) == [2]
    assert tree.num_pages == 2
    tree.check_integrity()


def test_what_was_trimmed_can_grow_again():
    tree = RadixTree(1)
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.evict(1)
    assert tree.insert([1, 2, 3, 4], [10, 11, 12, 13]).pages == [0, 1, 12, 13]
    tree.check_integrity()


def test_locked_pages_stay_and_what_is_below_them_goes():
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    node = tree.match([1, 2]).node
    tree.lock(node)
    assert tree.evict(100) == [2, 3]
    assert tree.evict(100) == []
    tree.unlock(node)
    assert tree.evict(100) == [0, 1]


@pytest.mark.parametrize("count", [0, -1])
def test_evicting_no_pages_takes_none(count):
    tree = make_tree(LRU())
    assert tree.evict(count) == []
    assert tree.num_pages == 8


def test_the_policies_are_known_by_name():
    assert [make_eviction_policy(name) for name in ("lru", "lfu", "fifo", "priority")] == [
        LRU(), LFU(), FIFO(), Priority()
    ]  # fmt: skip
    with pytest.raises(ValueError, match="eviction_policy must be one of lru, lfu, fifo, priority, got 'mru'"):
        make_eviction_policy("mru")


def test_a_policy_of_ones_own_decides():
    class ShortLived:
        def key(self, history):
            return history.created % 2, history.created

    tree = RadixTree(1, ShortLived())
    created = {}
    for index in range(6):
        tree.insert([index], [index])
        created[index] = tree.match([index]).node.created
    expected = sorted(range(6), key=lambda index: (created[index] % 2, created[index]))
    assert tree.evict(6) == expected


@pytest.mark.parametrize("seed", range(3))
def test_the_queue_follows_thousands_of_uses_and_does_not_grow_with_them(seed):
    rng = random.Random(seed)
    tree = RadixTree(1)
    last_use = {}
    for step in range(3000):
        index = rng.randrange(300)
        node = tree.insert([index], [index]).node if index not in last_use else tree.match([index]).node
        tree.lock(node)
        tree.unlock(node)
        last_use[index] = step
        if step % 7 == 0:
            victim = min(last_use, key=last_use.__getitem__)
            assert tree.evict(1) == [victim]
            del last_use[victim]
        if step % 31 == 30:
            gone = rng.choice(sorted(last_use))
            assert tree.remove([gone]) == [gone]
            del last_use[gone]
        if step % 100 == 0:
            tree.check_integrity()
    assert len(tree.queue) <= 2 * len(last_use)
    assert tree.evict(1000) == sorted(last_use, key=last_use.__getitem__)


def test_a_sequence_inserted_and_removed_again_and_again_leaves_nothing_in_the_queue():
    tree = RadixTree(1)
    for step in range(100):
        tree.insert([1, 2], [0, 1])
        tree.remove([1, 2])
        assert len(tree.queue) <= 2, f"{len(tree.queue)} entries after {step + 1} rounds"

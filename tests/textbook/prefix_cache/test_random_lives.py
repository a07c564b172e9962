"""Random lives of the source's tree and cache beside a plain dictionary, and bugs that this comparison finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cache.radix_tree import RadixTree as EngineTree
from jaxinfer.textbook.prefix_cache import PrefixCache, PrefixCacheConfig, RadixNode, RadixTree

Tokens = tuple[int, ...]

# Few tokens and few topics: most sequences begin another one, or leave it inside an edge.
SEQUENCES = st.builds(
    lambda topic, stem, ones, more: (topic,) * stem + (1,) * ones + (topic,) * more,
    st.sampled_from([2, 3]),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 2),
)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "remove", "reference", "release", "evict", "find"]),
        SEQUENCES,
        st.integers(0, 40),
    ),
    max_size=30,
)
SMALL = settings(max_examples=60, deadline=None)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@dataclass
class Model:
    """Cached sequences without a tree: places, references and order of use."""

    places: dict[Tokens, int] = field(default_factory=dict)
    references: dict[Tokens, int] = field(default_factory=dict)
    order: list[Tokens] = field(default_factory=list)  # the least recently used first

    @property
    def total(self) -> int:
        return sum(map(len, self.places))

    def use(self, tokens: Tokens) -> None:
        self.order = [each for each in self.order if each != tokens] + [tokens]

    def insert(self, tokens: Tokens, place: int) -> None:
        self.places[tokens] = place
        self.references.setdefault(tokens, 0)
        self.use(tokens)

    def remove(self, tokens: Tokens) -> bool:
        if tokens not in self.places:
            return False
        del self.places[tokens], self.references[tokens]
        self.order.remove(tokens)
        return True

    def reference(self, tokens: Tokens) -> bool:
        if tokens not in self.places:
            return False
        self.references[tokens] += 1
        self.use(tokens)
        return True

    def release(self, tokens: Tokens) -> bool:
        if self.references.get(tokens, 0) == 0:
            return False
        self.references[tokens] -= 1
        return True

    def evict(self, max_tokens: int) -> int:
        before = self.total
        while self.total > max_tokens:
            free = [
                each
                for each in self.order
                if each and self.references[each] == 0
                and not any(len(other) > len(each) and other[: len(each)] == each for other in self.places)
            ]  # fmt: skip
            if not free:
                break
            self.remove(free[0])
        return before - self.total

    def check_search(self, tree: RadixTree, tokens: Tokens) -> None:
        found = tree.find_longest_prefix(tokens)
        beginnings = [each for each in self.places if tokens[: len(each)] == each]
        if beginnings:
            best = max(beginnings, key=len)
            assert (found.matched_length, found.kv_cache_pos) == (len(best), self.places[best])
            assert found.matched_node.is_terminal and found.has_kv_cache() == (len(best) > 0)
        else:
            followed = max((common(tokens, each) for each in self.places), default=0)
            assert (found.matched_length, found.kv_cache_pos, found.has_kv_cache()) == (followed, -1, False)
            assert found.matched_node.prefix_length == followed - found.edge_offset


def check_nodes(node: RadixNode, start: Tokens = ()) -> dict[Tokens, RadixNode]:
    """Return the terminals by their sequences; fail unless every node has a reason to exist."""
    found = {start: node} if node.is_terminal else {}
    assert node.prefix_length == len(start) and node.is_leaf() == (not node.children)
    if node.parent is not None:
        assert node.edge_tokens and (node.is_terminal or len(node.children) > 1), "a node without a reason"
    for label, child in node.children.items():
        assert child.parent is node and child.edge_tokens[0] == label
        found |= check_nodes(child, start + tuple(child.edge_tokens))
    return found


def live(tree: RadixTree, operations: Sequence[tuple[str, Tokens, int]]) -> None:
    """Do the same to a tree and to a dictionary; fail where they differ."""
    model = Model()
    for operation, tokens, number in operations:
        if operation == "insert":
            tree.insert(tokens, number, len(tokens))
            model.insert(tokens, number)
        elif operation == "remove":
            assert tree.remove(tokens) == model.remove(tokens)
        elif operation == "reference":
            assert tree.add_reference(tokens) == model.reference(tokens)
        elif operation == "release":
            assert tree.release_reference(tokens) == model.release(tokens)
        elif operation == "evict":
            assert tree.evict_lru(number) == model.evict(number)
        model.check_search(tree, tokens)
        terminals = check_nodes(tree.root)
        assert {each: node.kv_info.kv_start_pos for each, node in terminals.items()} == model.places
        assert {each: node.kv_info.ref_count for each, node in terminals.items()} == model.references
        assert all(node.kv_info.kv_length == len(each) for each, node in terminals.items())
        assert tree.contains(tokens) == (tokens in model.places)
        assert tree.total_cached_tokens == model.total
        assert tree.get_stats().terminal_nodes == len(model.places) == tree.dump().count("*KV") + (() in model.places)


@SMALL
@given(OPERATIONS)
def test_a_tree_is_a_dictionary_of_its_sequences(operations):
    live(RadixTree(), operations)


@SMALL
@given(st.lists(SEQUENCES, max_size=8), SEQUENCES)
def test_the_engines_tree_finds_the_longest_prefix_of_all_and_this_one_the_longest_sequence(sequences, tokens):
    tree, engine = RadixTree(), EngineTree(1)
    page = 0
    for sequence in sequences:
        tree.insert(sequence, 0, len(sequence))
        engine.insert(sequence, range(page, page + len(sequence)))
        page += len(sequence)
    found = tree.find_longest_prefix(tokens)
    reused = found.matched_length if found.has_kv_cache() else 0
    matched = len(engine.match(tokens).pages)
    assert matched == max((common(tokens, each) for each in sequences), default=0)
    assert reused == max((len(each) for each in sequences if tokens[: len(each)] == each), default=0) <= matched


@SMALL
@given(st.lists(st.tuples(SEQUENCES, st.booleans(), st.booleans()), max_size=20), st.integers(1, 30))
def test_a_hit_was_inserted_is_long_enough_and_stays_until_its_release(requests, limit):
    cache = PrefixCache(PrefixCacheConfig(max_cached_tokens=limit, min_prefix_length=2))
    inserted: list[list[int]] = []
    held: list[list[int]] = []
    for tokens, ends, clears in requests:
        match = cache.match(tokens)
        assert match.prefill_start_pos == match.matched_tokens == len(match.matched_prefix)
        assert match.prefill_start_pos + match.prefill_count == len(tokens)
        assert match.cache_hit == (match.matched_tokens >= 2)
        if match.cache_hit:
            assert match.matched_prefix in inserted and match.matched_prefix == list(tokens[: match.matched_tokens])
            held.append(match.matched_prefix)
        cache.insert(tokens, 0, len(tokens))
        inserted.append(list(tokens))
        assert held or cache.get_cached_tokens() <= limit
        if ends and held:
            cache.release(held.pop(0))
        if clears:
            cache.evict(0)
        for prefix in held:
            again = cache.match(prefix)
            assert again.matched_prefix == prefix, "a sequence in use was evicted"
            cache.release(prefix)
    for prefix in held:
        cache.release(prefix)
    cache.evict(0)
    assert cache.get_cached_tokens() == 0 and cache.dump_tree() == "ROOT\n"


class KeepsNodes(RadixTree):
    """The source: nodes stay after their sequence is gone."""

    def _forget(self, node: RadixNode) -> None:
        self._total_cached_tokens -= node.kv_info.kv_length
        node.is_terminal, node.kv_info = False, type(node.kv_info)()


class IgnoresReferences(RadixTree):
    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and node.is_terminal and node.is_leaf()


class EvictsWithinSequences(RadixTree):
    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and node.is_terminal and node.kv_info.ref_count == 0


class LosesTheOrder(RadixTree):
    def _now(self) -> float:
        return -super()._now()


class SplitsTooLate(RadixTree):
    def _split(self, child: RadixNode, length: int) -> RadixNode:
        return child


@pytest.mark.parametrize(
    ("tree", "operations"),
    [
        (KeepsNodes, [("insert", (2, 2), 0), ("insert", (2, 2, 1), 0), ("evict", (), 4), ("evict", (), 0)]),
        (IgnoresReferences, [("insert", (2, 2), 0), ("reference", (2, 2), 0), ("evict", (), 0)]),
        (EvictsWithinSequences, [("insert", (2, 2), 0), ("insert", (2, 2, 1), 0), ("evict", (), 4)]),
        (LosesTheOrder, [("insert", (2, 2), 0), ("insert", (3, 3), 0), ("evict", (), 2)]),
        (SplitsTooLate, [("insert", (2, 2), 0), ("insert", (2, 1), 0)]),
    ],
)
def test_a_planted_bug_is_found(tree, operations):
    live(RadixTree(), operations)
    with pytest.raises(AssertionError):
        live(tree(), operations)

"""The source's radix tree: token sequences with places in one contiguous buffer of keys and values.

It has a class of its own beside the engine's `jaxinfer.cache.radix_tree.RadixTree` with pages of one token, because
their nodes differ: the engine has no terminals, a match of its tree splits edges, a sequence that grows stays one node,
and eviction trims a node. Here one insertion is one terminal, as the source draws it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxinfer.textbook.prefix_cache.radix_node import (
    KVCacheInfo,
    RadixMatchResult,
    RadixNode,
    common_length,
    token_list,
    whole_number,
)

_SHOWN_TOKENS = 5  # tokens of an edge that a dump shows


@dataclass(frozen=True)
class RadixTreeStats:
    """Size of a tree. The root is counted: the source's sketch of three nodes has `total_nodes` 4."""

    total_nodes: int = 0
    terminal_nodes: int = 0  # cached sequences
    total_cached_tokens: int = 0  # lengths of all cached sequences, summed
    max_depth: int = 0  # edges from the root to the deepest node

    def to_string(self) -> str:
        """Return the lines that the source prints after the counts of its cache."""
        return (
            "RadixTree Stats:\n"
            f"  Total nodes: {self.total_nodes}\n"
            f"  Terminal nodes: {self.terminal_nodes}\n"
            f"  Max depth: {self.max_depth}\n"
            f"  Cached tokens: {self.total_cached_tokens}\n"
        )


class RadixTree:
    """Cached sequences, found by their tokens. Every method holds the tree's lock, so threads may share a tree.

    After OrinMLLM's `RadixTree`. Kept from the source, although the engine does better:

    - Only whole cached sequences are reused. The engine reuses any shared prefix of whole pages.
    - `total_cached_tokens` and what `evict_lru` returns count every sequence with all its tokens, also those that it
      shares with other sequences. The engine counts a page once.
    - A reference is on a sequence and is found by its tokens. The engine has handles, whose locks cover the path.
    - A place in the buffer is believed. The tree does not learn that later keys and values replaced it; then call
      `remove` or `clear`. The engine's cached pages belong to its cache until they are evicted.

    Changed from the source, where no example depends on it:

    - A node that leads to no cached sequence leaves the tree, and a node with one child that ends no sequence is joined
      with the child. In the source such nodes stay for ever, and a sequence above an evicted one is never evicted.
    - `kv_length` is the number of tokens. The source accepts any number, and then adds `kv_length` but subtracts the
      number of tokens.
    - A reference is only taken on a cached sequence, not on a node that happens to end there or on the root.
    - Two accesses never have one time, so the order of eviction is that of use within a millisecond too.
    """

    Stats: ClassVar[type[RadixTreeStats]] = RadixTreeStats

    def __init__(self) -> None:
        self.root = RadixNode()
        self._lock = threading.RLock()
        self._total_cached_tokens = 0
        self._last_time = 0.0

    @property
    def total_cached_tokens(self) -> int:
        """Lengths of all cached sequences, summed."""
        return self._total_cached_tokens

    def insert(self, tokens: Sequence[int], kv_start_pos: int, kv_length: int) -> None:
        """Cache a sequence; if it is cached already, only its place and its time of access change.

        Args:
            tokens: the token ids from the first of the sequence on. An empty sequence makes the root terminal.
            kv_start_pos: index of the buffer's position that holds the keys and values of the first token.
            kv_length: positions, as many as tokens.

        Raises:
            ValueError: `kv_start_pos` is not an integer of at least 0, or `kv_length` is not the number of tokens.
        """
        tokens = token_list(tokens)
        kv_start_pos = whole_number("kv_start_pos", kv_start_pos)
        kv_length = whole_number("kv_length", kv_length)
        if kv_length != len(tokens):
            raise ValueError(f"kv_length must be the number of tokens, {len(tokens)}, got {kv_length}")
        with self._lock:
            node = self._node_for(tokens)
            if not node.is_terminal:
                node.is_terminal = True
                self._total_cached_tokens += kv_length
            node.kv_info.kv_start_pos, node.kv_info.kv_length = kv_start_pos, kv_length
            node.kv_info.last_access_time = self._now()

    def find_longest_prefix(self, tokens: Sequence[int]) -> RadixMatchResult:
        """Return the longest cached sequence that `tokens` begins with. Changes nothing, not even times of access."""
        tokens = token_list(tokens)
        with self._lock:
            node = self.root
            terminal = node if node.is_terminal else None
            start = edge_offset = 0
            while (child := node.children.get(tokens[start]) if start < len(tokens) else None) is not None:
                common = common_length(child.edge_tokens, tokens, start)
                start += common
                if common < len(child.edge_tokens):
                    edge_offset = common
                    break
                node = child
                if node.is_terminal:
                    terminal = node
            if terminal is None:
                return RadixMatchResult(start, node, edge_offset)
            return RadixMatchResult(terminal.prefix_length, terminal, edge_offset, terminal.kv_info.kv_start_pos)

    def contains(self, tokens: Sequence[int]) -> bool:
        """Whether exactly this sequence is cached."""
        with self._lock:
            return self._terminal(tokens) is not None

    def remove(self, tokens: Sequence[int]) -> bool:
        """Remove exactly this sequence, whether it is referenced or not.

        Returns:
            False if it is not cached.
        """
        with self._lock:
            node = self._terminal(tokens)
            if node is None:
                return False
            self._forget(node)
            return True

    def add_reference(self, tokens: Sequence[int]) -> bool:
        """Keep a cached sequence from being evicted until `release_reference`; it counts as used now.

        Returns:
            False if exactly this sequence is not cached; nothing is changed then.
        """
        with self._lock:
            node = self._terminal(tokens)
            if node is None:
                return False
            node.kv_info.ref_count += 1
            node.kv_info.last_access_time = self._now()
            return True

    def release_reference(self, tokens: Sequence[int]) -> bool:
        """Take back one reference.

        Returns:
            False if there is none, as after `remove` or `clear`; nothing is changed then.
        """
        with self._lock:
            node = self._terminal(tokens)
            if node is None or node.kv_info.ref_count == 0:
                return False
            node.kv_info.ref_count -= 1
            return True

    def evict_lru(self, max_tokens: int) -> int:
        """Evict sequences until at most `max_tokens` tokens are cached, or no sequence is left that may be evicted.

        A sequence may be evicted if it is not referenced and no cached sequence continues it. The least recently used
        one is first.

        Returns:
            The lengths of the evicted sequences, summed.

        Raises:
            ValueError: `max_tokens` is not an integer of at least 0.
        """
        max_tokens = whole_number("max_tokens", max_tokens)
        with self._lock:
            before = self._total_cached_tokens
            candidates = [
                (node.kv_info.last_access_time, node) for _, node in self._walk() if self._is_evictable(node)
            ]  # times differ, so nodes are never compared
            heapq.heapify(candidates)
            while self._total_cached_tokens > max_tokens and candidates:
                _, node = heapq.heappop(candidates)
                parent = node.parent
                assert parent is not None, "the root is no candidate"
                self._forget(node)
                if self._is_evictable(parent):
                    heapq.heappush(candidates, (parent.kv_info.last_access_time, parent))
            return before - self._total_cached_tokens

    def clear(self) -> None:
        """Remove all sequences, whether they are referenced or not."""
        with self._lock:
            self.root = RadixNode()
            self._total_cached_tokens = 0

    def get_stats(self) -> RadixTreeStats:
        """Return the size of the tree. Visits every node."""
        with self._lock:
            found = [(depth, node.is_terminal) for depth, node in self._walk()]
            return RadixTreeStats(
                len(found),
                sum(is_terminal for _, is_terminal in found),
                self._total_cached_tokens,
                max(depth for depth, _ in found),
            )

    def dump(self) -> str:
        """Draw the tree: a line for each edge with its first tokens, and for terminals their place and references."""
        with self._lock:
            return "".join(f"{'  ' * depth}{_drawn(node)}\n" for depth, node in self._walk())

    def _walk(self) -> list[tuple[int, RadixNode]]:
        """Return all nodes with their depths, each before its children. A stack, as a tree may be deeper than Python's
        recursion limit."""
        found: list[tuple[int, RadixNode]] = []
        stack = [(0, self.root)]
        while stack:
            depth, node = stack.pop()
            found.append((depth, node))
            stack += [(depth + 1, child) for child in reversed(node.children.values())]
        return found

    def _node_for(self, tokens: list[int]) -> RadixNode:
        """Return the node that ends with `tokens`; if there is none, make it."""
        node, start = self.root, 0
        while start < len(tokens):
            child = node.children.get(tokens[start])
            if child is None:
                child = RadixNode(tokens[start:], prefix_length=len(tokens), parent=node)
                node.children[tokens[start]] = child
                return child
            common = common_length(child.edge_tokens, tokens, start)
            node = child if common == len(child.edge_tokens) else self._split(child, common)
            start += common
        return node

    def _split(self, child: RadixNode, length: int) -> RadixNode:
        """Move the first `length` tokens of an edge to a new node above `child`, and return the new node."""
        parent = child.parent
        assert parent is not None, "the root has no edge to split"
        upper = RadixNode(child.edge_tokens[:length], prefix_length=parent.prefix_length + length, parent=parent)
        parent.children[upper.edge_tokens[0]] = upper
        child.edge_tokens = child.edge_tokens[length:]
        child.parent = upper
        upper.children[child.edge_tokens[0]] = child
        return upper

    def _forget(self, node: RadixNode) -> None:
        """Make a terminal node an ordinary one, and take nodes that are no longer needed out of the tree."""
        self._total_cached_tokens -= node.kv_info.kv_length
        node.is_terminal = False
        node.kv_info = KVCacheInfo()
        parent = node.parent
        if parent is not None and node.is_leaf():
            del parent.children[node.edge_tokens[0]]
            node.parent = None
            node = parent
        if node.parent is not None and not node.is_terminal and len(node.children) == 1:
            self._join(node, node.parent)

    def _join(self, node: RadixNode, parent: RadixNode) -> None:
        """Put the edge of `node` before that of its only child, which takes its place below `parent`."""
        (child,) = node.children.values()
        child.edge_tokens = node.edge_tokens + child.edge_tokens
        child.parent = parent
        parent.children[child.edge_tokens[0]] = child
        node.parent = None

    def _terminal(self, tokens: Sequence[int]) -> RadixNode | None:
        """Return the end of exactly this sequence; None: it is not cached."""
        found = self.find_longest_prefix(tokens)
        is_whole = found.matched_length == len(tokens) and found.matched_node.is_terminal
        return found.matched_node if is_whole else None

    def _is_evictable(self, node: RadixNode) -> bool:
        # The root ends the empty sequence, which holds nothing.
        return node.parent is not None and node.is_terminal and node.is_leaf() and node.kv_info.ref_count == 0

    def _now(self) -> float:
        """Return milliseconds of a steady clock, later than any time before."""
        self._last_time = max(time.monotonic_ns() / 1e6, math.nextafter(self._last_time, math.inf))
        return self._last_time


def _drawn(node: RadixNode) -> str:
    if node.parent is None:
        return "ROOT"
    shown = ",".join(map(str, itertools.islice(node.edge_tokens, _SHOWN_TOKENS)))
    left_out = len(node.edge_tokens) - _SHOWN_TOKENS
    line = f"Edge[{shown}{f'...+{left_out}' if left_out > 0 else ''}]"
    info = node.kv_info
    if node.is_terminal:
        line += f" *KV(pos={info.kv_start_pos},len={info.kv_length},ref={info.ref_count})"
    return line

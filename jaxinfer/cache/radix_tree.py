"""The radix tree: a map from token sequences to the pages of the pool that hold their keys and values.

After RadixAttention (SGLang, Zheng et al. 2024). Paths are compressed: one node holds all pages up to the next
branching. A match may end inside an edge: any shared prefix of whole pages is found, not only sequences that were
inserted as such. The tree holds page ids; it does not know what the pages contain, nor how many pools use them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from jaxinfer.cache.eviction import LRU, EvictionPolicy, EvictionQueue
from jaxinfer.cache.radix_node import TOKEN_BYTES, RadixNode, page_key
from jaxinfer.cache.radix_view import TreeStats, check_tree, draw_tree, measure_tree


class TreeMatch(NamedTuple):
    """The longest known prefix in whole pages, and the node that ends exactly there."""

    pages: list[int]
    node: RadixNode


class TreeInsert(NamedTuple):
    """The result of an insertion: how many of the pages were in the tree already, the tree's ids of all of them (which
    need not be the caller's ids), and the node that ends with the last one."""

    num_present: int
    pages: list[int]
    node: RadixNode


class RadixTree:
    """Token sequences in pages; namespaces (`extra_key`: a salt, a model's or adapter's id) share one root.

    Token arguments are ids or a key from `page_key`; only their whole pages count. A call takes time linear in tokens,
    at the speed of a memory comparison, plus a constant for every node on the path.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy | None = None) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.root = RadixNode(bytearray(), [], None, None)
        self.queue = EvictionQueue(policy or LRU())
        self.num_evictable = 0  # unlocked pages
        self.num_protected = 0  # locked pages
        self.clock = 0
        self._page_bytes = page_size * TOKEN_BYTES

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self.num_evictable + self.num_protected

    def match(self, token_ids: Sequence[int] | bytes, extra_key: Hashable = None) -> TreeMatch:
        """Return the longest prefix that the tree has; its nodes count a hit and a use.

        A match that ends inside an edge splits it, so that the result's node can be locked.
        """
        path, partial, common = self._walk(self.root, page_key(token_ids), extra_key)
        if partial is not None:
            path.append(self._split(partial, common))
        self.clock += 1
        pages: list[int] = []
        for node in path:
            node.hits += 1
            node.last_access = self.clock
            pages += node.pages
        return TreeMatch(pages, path[-1] if path else self.root)

    def take_back(self, node: RadixNode) -> None:
        """Take back the hits of a match that ended in `node`; the match's lock must still hold the node."""
        while node.parent is not None:
            node.hits -= 1
            node = node.parent

    def count_present(self, node: RadixNode, token_ids: Sequence[int] | bytes, extra_key: Hashable = None) -> int:
        """Return how many pages of `token_ids` the tree has below `node`. Changes nothing."""
        path, _, common = self._walk(node, page_key(token_ids), extra_key)
        return sum(len(node.pages) for node in path) + common

    def insert(
        self,
        token_ids: Sequence[int] | bytes,
        pages: Sequence[int],
        extra_key: Hashable = None,
        *,
        priority: int = 0,
    ) -> TreeInsert:
        """Add a sequence, and leave it unlocked.

        Raises:
            ValueError: `pages` are not as many as the tokens' whole pages.
        """
        self.lock(self.root)
        try:
            result = self.extend(self.root, token_ids, pages, extra_key, priority=priority)
        except ValueError:
            self.unlock(self.root)
            raise
        self.unlock(result.node)
        return result

    def extend(
        self,
        node: RadixNode,
        token_ids: Sequence[int] | bytes,
        pages: Sequence[int],
        extra_key: Hashable = None,
        *,
        priority: int = 0,
    ) -> TreeInsert:
        """Add the pages that follow the end of `node`, and move one lock of the caller's from there to the new end.

        The cost does not depend on the path above `node`. A node whose end only the caller has locked grows, so that a
        sequence published page by page does not become a chain of nodes; if another lock or a branch ends there, a
        child is made.

        Args:
            token_ids, pages: those after the node's end; the counts and pages of the result are of these.
            extra_key: the namespace, which is read only if `node` is the root.
            priority: the least priority that the whole path has afterwards.

        Raises:
            ValueError: `pages` are not as many as the tokens' whole pages, or `node` is not locked.
        """
        key = page_key(token_ids)
        self.check_count(key, pages)
        if node.locks == 0:
            raise ValueError("node must be locked by the caller, got one without locks")
        path, partial, common = self._walk(node, key, extra_key)
        present: list[int] = []
        for node in path:
            present += node.pages
            self._lock_one(node)
        if partial is not None:
            present += partial.pages[:common]
            if node.parent is not None and len(node.children) == 1 and node.locks == partial.locks + 1:
                self._shift(partial, node, common)
            else:
                node = self._split(partial, common)
                self._lock_one(node)
        num_present = len(present)
        if num_present < len(pages):
            node = self._grow(node, key, pages, num_present, extra_key)
        self._raise_priority(node, priority)
        present += pages[num_present:]
        return TreeInsert(num_present, present, node)

    def check_count(self, key: bytes, pages: Sequence[int]) -> None:
        """Raise ValueError unless there is one of `pages` for every whole page of `key`."""
        if len(pages) != len(key) // self._page_bytes:
            raise ValueError(
                f"pages must be {len(key) // self._page_bytes}, one for every {self.page_size} of "
                f"{len(key) // TOKEN_BYTES} tokens, got {len(pages)}"
            )

    def lock(self, node: RadixNode) -> None:
        """Keep the path from the root to `node` from being evicted, until `unlock`."""
        current: RadixNode | None = node
        while current is not None:
            self._lock_one(current)
            current = current.parent

    def unlock(self, node: RadixNode) -> None:
        """Remove one lock from the path to `node`, which counts as used until now.

        Raises:
            ValueError: the node is not locked.
        """
        if node.locks == 0:
            raise ValueError("node must be locked, got one without locks")
        self.clock += 1
        current: RadixNode | None = node
        while current is not None:
            current.locks -= 1
            current.last_access = self.clock
            if current.locks == 0:
                self.num_protected -= len(current.pages)
                self.num_evictable += len(current.pages)
                if current.is_candidate:
                    self.queue.add(current)
            current = current.parent

    def evict(self, num_pages: int) -> list[int]:
        """Remove up to `num_pages` unlocked pages, ends of sequences first, in the policy's order; return them.

        The last node is trimmed from its end, so that no more pages are removed than requested.
        """
        freed: list[int] = []
        while len(freed) < num_pages and (node := self.queue.first()) is not None:
            count = min(num_pages - len(freed), len(node.pages))
            freed += node.pages[-count:]
            if count == len(node.pages):
                self.queue.pop()
                self._unlink(node)
            else:
                del node.pages[-count:]
                del node.edge[-count * self._page_bytes :]
                self.num_evictable -= count
        return freed

    def remove(self, token_ids: Sequence[int] | bytes, extra_key: Hashable = None) -> list[int]:
        """Remove a sequence: from its end upwards, the unlocked pages that no other sequence continues."""
        path, _, _ = self._walk(self.root, page_key(token_ids), extra_key)
        freed: list[int] = []
        while path and path[-1].is_candidate:
            node = path.pop()
            freed += node.pages
            self._unlink(node)
            self.queue.note_gone(node)
        return freed

    def clear(self) -> list[int]:
        """Remove all unlocked pages; return them."""
        self.queue.clear()
        freed: list[int] = []
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.locks == 0 and node.parent is not None:
                freed += node.pages
                del node.parent.children[node.label]
                node.parent = None
        self.num_evictable = 0
        return freed

    def path_key(self, node: RadixNode) -> bytes:
        """Return the key of all tokens from the root to the end of `node`."""
        edges: list[bytearray] = []
        current: RadixNode | None = node
        while current is not None:
            edges.append(current.edge)
            current = current.parent
        return b"".join(reversed(edges))

    def dump(self, show: Callable[[list[int]], str] | None = None) -> str:
        """Draw the tree: for every node its tokens, pages, locks, hits and age in ticks.

        Args:
            show: formats a node's tokens, for instance as text.
        """
        return draw_tree(self.root, self.clock, show)

    def get_stats(self) -> TreeStats:
        """Return how many nodes, tokens and pages the tree has, and how deep it is. Visits every node."""
        return measure_tree(self.root)

    def check_integrity(self) -> None:
        """Raise AssertionError unless structure, locks, sums and the eviction queue agree. Visits every node."""
        assert check_tree(self.root, self._page_bytes) == (self.num_evictable, self.num_protected), "miscounted pages"
        self.queue.check_integrity()

    def _walk(self, node: RadixNode, key: bytes, extra_key: Hashable) -> tuple[list[RadixNode], RadixNode | None, int]:
        """Return the nodes below `node` that `key` matches whole; then the node that it matches in part, if there is
        one, and the number of matching pages of that."""
        page_bytes = self._page_bytes
        path: list[RadixNode] = []
        start = 0
        while start + page_bytes <= len(key):
            child = node.children.get(self._label(node, key, start, extra_key))
            if child is None:
                break
            common = child.common_pages(key, start, page_bytes)
            if common < len(child.pages):
                return path, child, common
            path.append(child)
            node = child
            start += len(child.edge)
        return path, None, 0

    def _label(self, parent: RadixNode, key: bytes | bytearray, start: int, extra_key: Hashable) -> Hashable:
        """Return the label, among the children of `parent`, of the page at byte `start` of `key`."""
        page = bytes(key[start : start + self._page_bytes])
        return page if parent.parent is not None else (extra_key, page)

    def _lock_one(self, node: RadixNode) -> None:
        if node.locks == 0:
            self.num_evictable -= len(node.pages)
            self.num_protected += len(node.pages)
        node.locks += 1

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Move the first pages of `node` into a new node above it, and return the new node."""
        parent = node.parent
        assert parent is not None, "the root has no edge to split"
        size = num_pages * self._page_bytes
        upper = RadixNode(node.edge[:size], node.pages[:num_pages], node.label, parent)
        upper.locks, upper.hits, upper.priority = node.locks, node.hits, node.priority
        upper.created, upper.last_access = node.created, node.last_access
        parent.children[node.label] = upper
        del node.edge[:size]
        del node.pages[:num_pages]
        node.parent = upper
        node.label = bytes(node.edge[: self._page_bytes])
        upper.children[node.label] = node
        return upper

    def _shift(self, child: RadixNode, parent: RadixNode, num_pages: int) -> None:
        """Move the first pages of an only child to the end of its parent."""
        size = num_pages * self._page_bytes
        if child.locks == 0:
            self.num_evictable -= num_pages
            self.num_protected += num_pages
        parent.edge += child.edge[:size]
        parent.pages += child.pages[:num_pages]
        del child.edge[:size]
        del child.pages[:num_pages]
        del parent.children[child.label]
        child.label = bytes(child.edge[: self._page_bytes])
        parent.children[child.label] = child

    def _grow(
        self, node: RadixNode, key: bytes, pages: Sequence[int], num_present: int, extra_key: Hashable
    ) -> RadixNode:
        """Append the pages from `num_present` on to `node`, which the caller has locked, or put them into a child."""
        start, end = num_present * self._page_bytes, len(pages) * self._page_bytes
        new = list(pages[num_present:])
        self.num_protected += len(new)
        if node.parent is not None and not node.children and node.locks == 1:
            node.edge += key[start:end]
            node.pages += new
            return node
        label = self._label(node, key, start, extra_key)
        child = RadixNode(bytearray(key[start:end]), new, label, node)
        child.locks = 1
        self.clock += 1
        child.created = child.last_access = self.clock
        node.children[label] = child
        return child

    def _raise_priority(self, node: RadixNode, priority: int) -> None:
        # A node has at least the priority of its children, so the climb ends at the first node that is high enough.
        while node.parent is not None and node.priority < priority:
            node.priority = priority
            node = node.parent

    def _unlink(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "the root stays"
        del parent.children[node.label]
        node.parent = None
        self.num_evictable -= len(node.pages)
        if parent.is_candidate:
            self.queue.add(parent)

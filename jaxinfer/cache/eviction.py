"""Eviction of cached pages: policies, and the queue of candidates."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.cache.radix_node import RadixNode


class CacheHistory(Protocol):
    """The history of a node, as policies see it. Times are ticks of the tree's clock, not seconds."""

    @property
    def created(self) -> int: ...
    @property
    def last_access(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def priority(self) -> int: ...


class EvictionPolicy(Protocol):
    """An order of candidates: the node with the smallest key is evicted first.

    A node's key must not be smaller than it was when the node was last a candidate: the queue relies on that. Every
    tuple of a history's numbers qualifies, as they only rise; a hit is taken back only while a lock keeps the node.
    """

    def key(self, history: CacheHistory) -> Any: ...


@dataclass(frozen=True)
class LRU:
    """Evict the least recently used node first."""

    def key(self, history: CacheHistory) -> int:
        return history.last_access


@dataclass(frozen=True)
class LFU:
    """Evict the least often matched node first, among equals the least recently used."""

    def key(self, history: CacheHistory) -> tuple[int, int]:
        return history.hits, history.last_access


@dataclass(frozen=True)
class FIFO:
    """Evict the oldest node first. A node is as old as its first page, even if it has grown since."""

    def key(self, history: CacheHistory) -> int:
        return history.created


@dataclass(frozen=True)
class Priority:
    """Evict the node of lowest priority first, among equals the least recently used.

    Pages have the highest priority of all insertions that went through them.
    """

    def key(self, history: CacheHistory) -> tuple[int, int]:
        return history.priority, history.last_access


EVICTION_POLICIES: dict[str, type[LRU] | type[LFU] | type[FIFO] | type[Priority]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "priority": Priority,
}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """Make the policy called `name`.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, got {name!r}")
    return EVICTION_POLICIES[name]()


class EvictionQueue:
    """Candidates in the order of a policy: a heap that is corrected when it is read, not when a node changes.

    A node has at most one entry. The entry may be stale: the node may have been used since, be locked, have children
    or have left the tree. Because keys only rise, a stale entry is too early in the order, never too late, so it is
    found in time.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        # Entries are [key, order, node], corrected in place: ten thousand new ones would trigger the garbage collector.
        self._heap: list[list[Any]] = []
        self._order = itertools.count()  # equal keys: first queued, first out; nodes are never compared
        self._num_gone = 0  # entries whose node has left the tree
        self._num_corrected = 0  # stale entries found since the last rebuild

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: RadixNode) -> None:
        """Add a node that has become a candidate."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, [self.policy.key(node), next(self._order), node])

    def first(self) -> RadixNode | None:
        """Return the candidate to evict first, which stays in the queue; None if there is none."""
        heap = self._heap
        while heap:
            key, _, node = entry = heap[0]
            if not node.is_candidate:
                heapq.heappop(heap)
                node.queued = False
                self._num_gone -= node.parent is None
            elif (current := self.policy.key(node)) != key:
                entry[0] = current
                heapq.heapreplace(heap, entry)
            else:
                return node
            self._num_corrected += 1
            if self._num_corrected > 64 + len(heap) // 64:  # many others are likely stale too: correct all at once
                self._rebuild()
        return None

    def pop(self) -> None:
        """Remove the candidate that `first` has returned."""
        heapq.heappop(self._heap)[2].queued = False

    def note_gone(self, node: RadixNode) -> None:
        """Note that a node has left the tree without being popped."""
        if node.queued:
            self._num_gone += 1
            if self._num_gone * 2 > len(self._heap):
                self._rebuild()

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()
        self._num_gone = self._num_corrected = 0

    def _rebuild(self) -> None:
        key_of = self.policy.key
        kept = []
        for entry in self._heap:
            node = entry[2]
            node.queued = node.is_candidate
            if node.queued:
                entry[0] = key_of(node)
                kept.append(entry)
        self._heap[:] = kept
        heapq.heapify(self._heap)
        self._num_gone = self._num_corrected = 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless every entry's node is marked as queued and has only this entry."""
        nodes = [node for _, _, node in self._heap]
        assert len(set(map(id, nodes))) == len(nodes), "a node is twice in the eviction queue"
        assert all(node.queued for node in nodes), "a queued node does not know that it is queued"
        assert self._num_gone == sum(node.parent is None for node in nodes), "miscounted nodes that left the tree"

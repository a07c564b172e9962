"""Which cached pages go first: eviction policies, and the queue of what may go."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.cache.radix_node import RadixNode


class CacheHistory(Protocol):
    """What a policy may look at. Times are ticks of the tree's clock, not seconds."""

    @property
    def created(self) -> int: ...
    @property
    def last_access(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def priority(self) -> int: ...


class EvictionPolicy(Protocol):
    """Orders candidates: the smallest key goes first.

    A key must not fall from one time that its node may go to the next. All numbers of a history only rise, but for a
    hit that is taken back while its lock keeps the node; so this holds for every tuple of them. The queue counts on it.
    """

    def key(self, history: CacheHistory) -> Any: ...


@dataclass(frozen=True)
class LRU:
    """The least recently used goes first."""

    def key(self, history: CacheHistory) -> int:
        return history.last_access


@dataclass(frozen=True)
class LFU:
    """The least often matched goes first, among equals the least recently used."""

    def key(self, history: CacheHistory) -> tuple[int, int]:
        return history.hits, history.last_access


@dataclass(frozen=True)
class FIFO:
    """The oldest goes first. A node is as old as its first page, also when it has grown since."""

    def key(self, history: CacheHistory) -> int:
        return history.created


@dataclass(frozen=True)
class Priority:
    """The lowest priority goes first, among equals the least recently used.

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
    """The policy of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, got {name!r}")
    return EVICTION_POLICIES[name]()


class EvictionQueue:
    """Candidates in the order of a policy: a heap that is put right when it is read, not when a node changes.

    A node has at most one entry. It may be out of date: the node may have been used since, be locked, have children
    or have left the tree. Because keys only rise, an entry that is out of date stands too far in front, never too far
    behind, and is met before it can do harm.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        # Entries are [key, order, node], corrected in place: ten thousand new ones would wake the garbage collector.
        self._heap: list[list[Any]] = []
        self._order = itertools.count()  # equal keys: first queued, first out; nodes are never compared
        self._num_gone = 0  # entries whose node has left the tree
        self._num_corrected = 0  # entries that were found out of date since the last rebuild

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: RadixNode) -> None:
        """Take in a node that has become a candidate."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, [self.policy.key(node), next(self._order), node])

    def first(self) -> RadixNode | None:
        """The candidate that goes first; it stays in the queue. None: there is no candidate."""
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
            if self._num_corrected > 64 + len(heap) // 64:  # the rest is likely no better: put all right at once
                self._rebuild()
        return None

    def pop(self) -> None:
        """Drop what `first` has returned."""
        heapq.heappop(self._heap)[2].queued = False

    def note_gone(self, node: RadixNode) -> None:
        """A node has left the tree without being popped."""
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
        """Raises AssertionError unless every entry's node says that it has one, and only one."""
        nodes = [node for _, _, node in self._heap]
        assert len(set(map(id, nodes))) == len(nodes), "a node stands twice in the eviction queue"
        assert all(node.queued for node in nodes), "a queued node does not know that it is queued"
        assert self._num_gone == sum(node.parent is None for node in nodes), "miscounted nodes that left the tree"

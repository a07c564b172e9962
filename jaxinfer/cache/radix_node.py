"""A node of the radix tree, and the byte keys by which tokens are compared at the speed of memory."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

TOKEN_BYTES = array("i").itemsize


def page_key(token_ids: Sequence[int] | bytes) -> bytes:
    """Return token ids as the bytes that a tree compares: `TOKEN_BYTES` for each.

    A key is returned as it is, so that a request may compute its key once and pass it to every call that takes tokens.

    Raises:
        ValueError: a token id does not fit in 32 bits, or a key ends inside a token.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(f"a key must have a multiple of {TOKEN_BYTES} bytes, got {len(token_ids)}")
        return token_ids
    try:
        return array("i", token_ids).tobytes()
    except OverflowError as error:
        raise ValueError(f"token_ids must fit in 32 bits, got one up to {max(token_ids, key=abs)}") from error


class RadixNode:
    """The edge from a parent: whole pages of tokens, and the pool's pages that hold their keys and values.

    A node object stands for its *end*: a lock on it covers the path from the root to there. A split makes a new node
    for the upper half, so that the object keeps its end.
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "hits",
        "label",
        "last_access",
        "locks",
        "pages",
        "parent",
        "priority",
        "queued",
    )

    def __init__(self, edge: bytearray, pages: list[int], label: Hashable, parent: RadixNode | None) -> None:
        self.edge = edge  # token bytes, a multiple of a page's
        self.pages = pages  # page ids, one for each page of the edge
        self.label = label  # its key in the parent's `children`: its first page; below the root, with the namespace
        self.parent = parent  # None for the root, and for a node that has left the tree
        self.children: dict[Hashable, RadixNode] = {}
        self.locks = 0  # locks on this node's end and on all ends below it
        self.hits = 0  # matches that went through it
        self.created = 0  # ticks of the tree's clock
        self.last_access = 0
        self.priority = 0
        self.queued = False  # has an entry in the eviction queue

    @property
    def is_candidate(self) -> bool:
        """Whether the node may be evicted: it is an unlocked leaf of the tree."""
        return self.parent is not None and not self.children and self.locks == 0

    @property
    def token_ids(self) -> list[int]:
        """The edge's tokens."""
        return array("i", bytes(self.edge)).tolist()

    def common_pages(self, key: bytes, start: int, page_bytes: int) -> int:
        """Return how many leading pages of the edge `key` repeats from byte `start` on; the first is known to agree."""
        edge = self.edge
        if key.startswith(edge, start):
            return len(self.pages)
        low, high = 1, min(len(edge), len(key) - start) // page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(edge[low * page_bytes : middle * page_bytes], start + low * page_bytes):
                low = middle
            else:
                high = middle - 1
        return low

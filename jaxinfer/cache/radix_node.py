"""A node of the radix tree, and the keys through which tokens are compared at the speed of memory."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

TOKEN_BYTES = array("i").itemsize


def page_key(token_ids: Sequence[int] | bytes) -> bytes:
    """Token ids as the bytes that a tree compares: `TOKEN_BYTES` for each.

    A key passes through, so that a request may compute its own once and hand it to every call that takes tokens.

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

    A node object stands for its *end*: whoever locks it means the path from the root to there. A split makes a new
    node for the upper half, so that the end stays where it was.
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
        self.label = label  # where it stands among the parent's children: its first page, at the root with a namespace
        self.parent = parent  # None for the root, and for what has left the tree
        self.children: dict[Hashable, RadixNode] = {}
        self.locks = 0  # of this node's end and of all ends below it
        self.hits = 0  # matches that went through it
        self.created = 0  # ticks of the tree's clock
        self.last_access = 0
        self.priority = 0
        self.queued = False  # has an entry in the eviction queue

    @property
    def is_candidate(self) -> bool:
        """Whether eviction may take it: in the tree, the last of its path, locked by nobody."""
        return self.parent is not None and not self.children and self.locks == 0

    @property
    def token_ids(self) -> list[int]:
        """The edge's tokens."""
        return array("i", bytes(self.edge)).tolist()

    def common_pages(self, key: bytes, start: int, page_bytes: int) -> int:
        """How many pages of the edge `key` repeats from byte `start` on; the first is known to agree."""
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

"""Nodes of the source's radix tree, and the result of a search."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

_MIN_TOKEN, _MAX_TOKEN = -(2**31), 2**31 - 1


@dataclass(slots=True)
class KVCacheInfo:
    """Place of a cached sequence's keys and values in one contiguous buffer, and the use of it."""

    kv_start_pos: int = 0  # first position in the buffer
    kv_length: int = 0  # positions, one for each token from the root to the node
    last_access_time: float = 0.0  # milliseconds of a steady clock; different for any two accesses of a tree
    ref_count: int = 0  # requests that use the sequence


@dataclass(slots=True, eq=False)
class RadixNode:
    """The end of an edge. A terminal node is the end of a cached sequence; only terminal nodes have keys and values.

    The engine's node has no terminal flag: it has pages for all tokens of its edge, so any of its prefixes can be used.
    """

    edge_tokens: list[int] = field(default_factory=list)  # tokens between the parent's end and this node's
    children: dict[int, RadixNode] = field(default_factory=dict, repr=False)  # by the first token of their edges
    is_terminal: bool = False
    kv_info: KVCacheInfo = field(default_factory=KVCacheInfo)  # all 0 unless terminal
    prefix_length: int = 0  # tokens from the root to this node's end
    parent: RadixNode | None = field(default=None, repr=False)  # None for the root and for nodes that left the tree

    def is_leaf(self) -> bool:
        """Whether no sequence continues after this node."""
        return not self.children


@dataclass(frozen=True)
class RadixMatchResult:
    """The result of `RadixTree.find_longest_prefix`.

    If a cached sequence begins the tokens that were searched for, the result is the longest such sequence. If none
    does, the result says how far the tree follows the tokens, and has no keys and values.
    """

    matched_length: int  # tokens
    matched_node: RadixNode  # the end of the sequence; if there is none, the last node whose edge matches whole
    edge_offset: int = 0  # tokens that match of the edge in which the search ended; 0: it ended at the end of an edge
    kv_cache_pos: int = -1  # first position of the sequence in the buffer; -1: none

    def has_kv_cache(self) -> bool:
        """Whether keys and values of at least one token can be reused."""
        return self.kv_cache_pos >= 0 and self.matched_length > 0


def token_list(tokens: Sequence[int]) -> list[int]:
    """Return token ids as a list of int.

    Raises:
        ValueError: a token id is not an integer of 32 bits.
    """
    found: list[int] = []
    for token in tokens:
        try:
            found.append(operator.index(token))
        except TypeError as error:
            raise ValueError(f"tokens must be integers, got {token!r}") from error
        if not _MIN_TOKEN <= found[-1] <= _MAX_TOKEN:
            raise ValueError(f"tokens must fit in 32 bits, got {token!r}")
    return found


def whole_number(name: str, value: int) -> int:
    """Return `value` as an int.

    Raises:
        ValueError: it is not an integer of at least 0; `name` is the argument's.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    return operator.index(value)


def common_length(edge: Sequence[int], tokens: Sequence[int], start: int) -> int:
    """Return how many leading tokens of `edge` equal those of `tokens` from index `start` on."""
    limit = min(len(edge), len(tokens) - start)
    count = 0
    while count < limit and edge[count] == tokens[start + count]:
        count += 1
    return count

"""The tokens of a vocabulary as a trie of bytes, which is walked level by level in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# (states, bytes) -> states, elementwise; negative where a byte is not possible.
Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


class ByteTrie:
    """A trie whose nodes are numbered by depth, then in the order of their strings: a node's children are contiguous.

    Args:
        pieces: the bytes of each token; None or empty for tokens that are on no path.
    """

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        parent, byte, depth = [0], [0], [0]
        node_of_piece: dict[bytes, int] = {}
        path = [0]  # the nodes of the previous string, from the root on
        previous = b""
        for piece in sorted({piece for piece in pieces if piece}):
            shared = _common_prefix(previous, piece)
            del path[shared + 1 :]
            for index in range(shared, len(piece)):
                parent.append(path[-1])
                byte.append(piece[index])
                depth.append(index + 1)
                path.append(len(parent) - 1)
            node_of_piece[piece] = path[-1]
            previous = piece

        order = np.argsort(depth, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        self.num_nodes = order.size
        self._byte = np.asarray(byte)[order]  # in the dtype of an index, because it is used as one
        parents = rank[np.asarray(parent)[order[1:]]]
        self._num_children = np.bincount(parents, minlength=order.size)
        self._first_child = 1 + np.cumsum(self._num_children) - self._num_children
        # Tokens on no path point to an extra entry after the last node.
        at = [node_of_piece[piece] if piece else -1 for piece in pieces]
        self._node_of_token = np.append(rank, order.size)[at]

    def walk(self, state: int, step: Step) -> np.ndarray:
        """Return bool [tokens]: whether all bytes of a token are possible in order from `state`."""
        reached = np.zeros(self.num_nodes + 1, bool)
        nodes, states = np.zeros(1, np.intp), np.full(1, state)
        while nodes.size:
            counts = self._num_children.take(nodes)
            # The children of a node are a range: its first child, less how many come before it, plus a running number.
            offsets = self._first_child.take(nodes) - (np.cumsum(counts) - counts)
            children = np.repeat(offsets, counts)
            children += np.arange(children.size)
            following = step(np.repeat(states, counts), self._byte.take(children))
            possible = np.flatnonzero(following >= 0)
            nodes, states = children.take(possible), following.take(possible)
            reached[nodes] = True
        return reached[self._node_of_token]


def _common_prefix(first: bytes, second: bytes) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length

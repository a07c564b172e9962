"""Views of a whole radix tree: a drawing, its size, and a check that it is sound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxinfer.cache.radix_node import TOKEN_BYTES, RadixNode


def draw_tree(root: RadixNode, clock: int, show: Callable[[list[int]], str] | None = None) -> str:
    """Draw the tree, one line for every node, with box characters for branches.

    Args:
        root: the root, which has no tokens of its own.
        clock: the tree's clock now, from which ages are counted.
        show: formats a node's tokens.
    """
    lines = ["root" if root.children else "root (empty)"]
    # Depth first, last pushed, first drawn. A stack, because a tree may be deeper than Python's recursion limit.
    stack = [(child, "", index == 0) for index, child in enumerate(reversed(root.children.values()))]
    while stack:
        node, indent, is_last = stack.pop()
        lines.append(f"{indent}{'└─' if is_last else '├─'} {_describe(node, clock, show)}")
        deeper = indent + ("   " if is_last else "│  ")
        stack += [(child, deeper, index == 0) for index, child in enumerate(reversed(node.children.values()))]
    return "\n".join(lines)


def _describe(node: RadixNode, clock: int, show: Callable[[list[int]], str] | None) -> str:
    token_ids = node.token_ids
    parts = [
        _count(len(token_ids), "token"),
        _count(len(node.pages), "page"),
        _count(node.locks, "lock"),
        _count(node.hits, "hit"),
        f"age {clock - node.last_access}",
    ]
    if isinstance(node.label, tuple) and node.label[0] is not None:
        parts.append(f"namespace {node.label[0]!r}")
    line = " · ".join(parts)
    return line if show is None else f"{line}  {show(token_ids)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class TreeStats:
    """Size of a tree. The root is no node of these counts: an empty tree has none."""

    num_nodes: int
    num_leaves: int  # ends of sequences that no other sequence continues
    depth: int  # nodes on the longest path
    num_tokens: int
    num_pages: int
    num_locked_pages: int  # pages of these that requests use


def measure_tree(root: RadixNode) -> TreeStats:
    """Return the size of the tree. Visits every node."""
    num_nodes = num_leaves = num_tokens = num_pages = num_locked = 0
    depths = {root: 0}
    for node in walk_tree(root):
        assert node.parent is not None, "the root is not walked"
        depths[node] = depths[node.parent] + 1
        num_nodes += 1
        num_leaves += not node.children
        num_tokens += len(node.edge) // TOKEN_BYTES
        num_pages += len(node.pages)
        num_locked += len(node.pages) * (node.locks > 0)
    return TreeStats(num_nodes, num_leaves, max(depths.values()), num_tokens, num_pages, num_locked)


def walk_tree(root: RadixNode) -> Iterator[RadixNode]:
    """Yield every node below `root`, parents before their children."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def check_tree(root: RadixNode, page_bytes: int) -> tuple[int, int]:
    """Return the number of unlocked pages and the number of locked pages.

    Raises:
        AssertionError: a node contradicts its parent, its siblings or its own edge, or shares a page with another one.
    """
    evictable = protected = 0
    seen: set[int] = set()
    _check_children(root, page_bytes)
    for node in walk_tree(root):
        assert node.pages, "a node without pages"
        assert len(node.edge) == len(node.pages) * page_bytes, "a node's tokens do not fill its pages"
        assert not seen & set(node.pages) and len(set(node.pages)) == len(node.pages), "a page is twice in the tree"
        assert node.queued or not node.is_candidate, "a node that could be evicted is not queued"
        seen.update(node.pages)
        evictable += len(node.pages) * (node.locks == 0)
        protected += len(node.pages) * (node.locks > 0)
        _check_children(node, page_bytes)
    return evictable, protected


def _check_children(node: RadixNode, page_bytes: int) -> None:
    assert node.locks >= sum(child.locks for child in node.children.values()), "a lock below that is not locked above"
    for label, child in node.children.items():
        page = label[1] if isinstance(label, tuple) else label
        assert child.parent is node and child.label == label, "parent and child disagree about each other"
        assert page == child.edge[:page_bytes], "a child is not labelled with its first page"
        if node.parent is not None:
            assert node.priority >= child.priority, "a path's priority rises towards its end"
            assert node.last_access >= child.last_access or child.locks, "a child was used after its parent"

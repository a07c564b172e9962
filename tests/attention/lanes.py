"""Lanes of every kind, each told token by token: what a query should see is recorded while the lane is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Query:
    """A new token of a lane: how the rule is told what it sees, and what it is meant to see."""

    index: int  # the lane index that it is written to
    limit: int
    branch: int
    sees: frozenset[int]  # lane indices, by construction
    tail: frozenset[int] = frozenset()  # offsets from the lane's tail_start
    first: int = 0


@dataclass(frozen=True)
class Lane:
    """One row's past and new tokens. `written` holds the lane indices that have content; the others are garbage."""

    page_size: int
    kv_len: int
    trunk_len: int
    tail_start: int
    owners: tuple[int, ...]  # the branch of each page
    written: frozenset[int]
    queries: tuple[Query, ...]


def plain_lane(page_size: int, context: int, new: int) -> Lane:
    """`context` cached tokens and `new` ones after them: a decode (new = 1), a prefill, a chunk of one, a cache hit."""
    length = context + new
    queries = tuple(Query(i, i, -1, frozenset(range(i + 1))) for i in range(context, length))
    pages = -(-length // page_size)
    return Lane(page_size, length, length, length, (-1,) * pages, frozenset(range(length)), queries)


def block_lane(page_size: int, context: int, block: int) -> Lane:
    """A diffusion block after `context` tokens: its tokens see each other in both directions."""
    lane = plain_lane(page_size, context, block)
    everything = frozenset(range(lane.kv_len))
    return replace(lane, queries=tuple(replace(q, limit=lane.kv_len - 1, sees=everything) for q in lane.queries))


def branched_lane(
    rng: np.random.Generator,
    page_size: int,
    trunk_len: int,
    lengths: Sequence[int],
    *,
    new: int = 1,
    only: int | None = None,
) -> Lane:
    """A trunk and branches that grew side by side, each in pages of its own.

    Args:
        lengths: tokens of each branch.
        new: the last `new` tokens of every branch are queries.
        only: queries of this branch alone.
    """
    # Owners of pages that lie wholly in the trunk are never looked at: anything may stand there.
    owners = rng.integers(-1, len(lengths), -(-trunk_len // page_size)).tolist()
    free: list[list[int]] = [[] for _ in lengths]  # unwritten lane indices of each branch, the next one last
    boundary = list(range(trunk_len, len(owners) * page_size))
    if boundary:  # the rest of the trunk's last page belongs to no branch or to the first
        owners[-1] = -1
        if lengths and rng.random() < 0.5:
            owners[-1] = 0
            free[0] = boundary[::-1]
    turns = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    history: list[list[int]] = [[] for _ in lengths]
    for branch in turns.tolist():
        if not free[branch]:
            start = len(owners) * page_size
            owners.append(branch)
            free[branch] = list(range(start + page_size - 1, start - 1, -1))
        history[branch].append(free[branch].pop())
    trunk = frozenset(range(trunk_len))
    written = trunk.union(*history)
    queries = [
        Query(index, index, branch, trunk | set(past[: at + 1]))
        for branch, past in enumerate(history)
        if only in (None, branch)
        for at, index in list(enumerate(past))[len(past) - new :]
    ]
    kv_len = max(written, default=-1) + 1
    return Lane(page_size, kv_len, trunk_len, kv_len, tuple(owners), written, tuple(queries))


def with_tail(rng: np.random.Generator, lane: Lane, nodes: int, *, chain: bool = False) -> Lane:
    """The lane's tokens as context, and a random forest of draft nodes after it.

    Every query of `lane` is where a tree may start: the node continues that query's branch.
    """
    pages = -(-(lane.kv_len + nodes) // lane.page_size)
    owners = (*lane.owners, *rng.integers(-1, 3, pages - len(lane.owners)).tolist())
    queries: list[Query] = []
    for offset in range(nodes):
        index = lane.kv_len + offset
        earlier = len(queries)
        parent = earlier - 1 if chain else int(rng.integers(-1, earlier))
        if parent < 0:
            root = lane.queries[rng.integers(len(lane.queries))]
            seen, tail, limit, branch = root.sees, frozenset(), root.limit, root.branch
        else:
            before = queries[parent]
            seen, tail, limit, branch = before.sees, before.tail, before.limit, before.branch
        queries.append(Query(index, limit, branch, seen | {index}, tail | {offset}))
    kv_len = lane.kv_len + nodes
    return replace(
        lane,
        kv_len=kv_len,
        tail_start=lane.kv_len,
        owners=owners,
        written=lane.written | set(range(lane.kv_len, kv_len)),
        queries=tuple(queries),
    )


def windowed(lane: Lane, window: int) -> Lane:
    """The lane, whose queries see the last `window` tokens of what they saw, themselves among them."""
    queries = []
    for query in lane.queries:
        seen = sorted(query.sees)[-window:]
        in_context = [index for index in seen if index < lane.tail_start]
        tail = frozenset(index - lane.tail_start for index in seen if index >= lane.tail_start)
        first = in_context[0] if in_context else lane.tail_start
        queries.append(replace(query, sees=frozenset(seen), tail=tail, first=first))
    return replace(lane, queries=tuple(queries))


def tail_words(tail: frozenset[int], words: int) -> np.ndarray:
    """uint32 [words] with the bit of every offset in `tail` set."""
    packed = np.zeros(words, np.uint32)
    for offset in tail:
        packed[offset // 32] |= np.uint32(1 << (offset % 32))
    return packed

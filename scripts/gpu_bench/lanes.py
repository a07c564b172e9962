"""The integers of attention steps: decodes, prefills, branches of one lane, the same as lanes, draft trees.

A step is made of rows; a row says where its tokens are stored and what its queries see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.metadata import AttentionMetadata

_WORD = 32


@dataclass(frozen=True)
class LaneRow:
    """One row: the pages of its lane and its queries. Q queries, N pages."""

    pages: np.ndarray  # int [N], page ids
    kv_len: int
    limit: np.ndarray  # int [Q]
    index: np.ndarray  # int [Q], the lane index of each query's own token
    owners: np.ndarray  # int [N], the branch of each page
    branch: np.ndarray  # int [Q]
    trunk_len: int
    tail_start: int
    tail_bits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # [Q, nodes], empty without a tail


@dataclass(frozen=True)
class LaneStep:
    """Rows laid out as a step. `kv_tokens` counts the slots that at least one query sees, each once."""

    metadata: AttentionMetadata
    rows: tuple[LaneRow, ...]
    kv_tokens: int
    pairs: int  # of a query and a token that it sees

    @property
    def num_tokens(self) -> int:
        return self.metadata.limit.shape[0]


class Pages:
    """Hands out the pages of a pool in random order."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.page_size = page_size
        self._free = list(np.random.default_rng(seed).permutation(num_pages))

    def take(self, tokens: int) -> np.ndarray:
        """Pages for so many tokens."""
        count = -(-tokens // self.page_size)
        if count > len(self._free):
            raise ValueError(f"{count} pages are wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return np.asarray(taken, np.int32)


def plain_row(pages: np.ndarray, context: int, new: int = 1) -> LaneRow:
    """`new` tokens after `context` cached ones, causal."""
    at = np.arange(context, context + new)
    none = np.full(new, -1)
    return LaneRow(pages, context + new, at, at, np.full(len(pages), -1), none, context + new, context + new)


def branch_row(pages: np.ndarray, page_size: int, branches: int, trunk: int, own: int) -> LaneRow:
    """The last tokens of branches that grew side by side after a trunk of whole pages; `own` tokens each.

    Raises:
        ValueError: `trunk` or `own` is not a number of whole pages.
    """
    if trunk % page_size or own % page_size:
        raise ValueError(f"trunk ({trunk}) and own tokens ({own}) must be multiples of the page size, {page_size}")
    trunk_pages, own_pages = trunk // page_size, own // page_size
    number = np.arange(branches)
    # Round by round, every branch took a page: the last page of branch b is page b of the last round.
    last = (trunk_pages + (own_pages - 1) * branches + number + 1) * page_size - 1
    owners = np.concatenate([np.full(trunk_pages, -1), np.tile(number, own_pages)])
    kv_len = trunk + branches * own
    return LaneRow(pages, kv_len, last, last, owners, number, trunk, kv_len)


def tree_row(pages: np.ndarray, context: int, nodes: int, seed: int) -> LaneRow:
    """A random draft tree of `nodes` nodes after `context` cached tokens; each node is a query."""
    rng = np.random.default_rng(seed)
    bits = np.zeros((nodes, nodes), bool)
    for node in range(nodes):
        parent = int(rng.integers(-1, node)) if node else -1
        if parent >= 0:
            bits[node] = bits[parent]
        bits[node, node] = True
    limit, none = np.full(nodes, context - 1), np.full(nodes, -1)
    owners = np.full(len(pages), -1)
    return LaneRow(pages, context + nodes, limit, context + np.arange(nodes), owners, none, context, context, bits)


def lay_out(
    decode: Sequence[LaneRow], prefill: Sequence[LaneRow] = (), *, pages_per_row: int, num_pages: int, page_size: int
) -> LaneStep:
    """Rows as the arrays of one step; rows of fewer queries than the widest decode row are padded."""
    rows = (*decode, *prefill)
    width = max((len(row.limit) for row in decode), default=0)
    tokens = width * len(decode) + sum(len(row.limit) for row in prefill)
    words = -(-max(row.tail_bits.shape[1] for row in rows) // _WORD)
    by_token = {name: np.full(tokens, -1, np.int32) for name in ("limit", "branch")}
    slots = num_pages * page_size + np.arange(tokens)
    of_token = np.zeros(tokens, np.int32)
    tail_bits = np.zeros((tokens, words), np.uint32)
    table = np.zeros((len(rows), pages_per_row), np.int32)
    owner = np.full((len(rows), pages_per_row), -1, np.int32)
    starts = np.zeros(len(rows) + 1, np.int32)
    first = pairs = 0
    read: list[np.ndarray] = []
    for number, row in enumerate(rows):
        starts[number], count = first, len(row.limit)
        at = slice(first, first + count)
        by_token["limit"][at], by_token["branch"][at], of_token[at] = row.limit, row.branch, number
        slots[at] = row.pages[row.index // page_size] * page_size + row.index % page_size
        tail_bits[at] = _packed(row.tail_bits, count, words)
        table[number, : len(row.pages)], owner[number, : len(row.pages)] = row.pages, row.owners
        seen = visible_pairs(row, page_size)
        read.append(slots_of(row, page_size)[seen.any(axis=0)])
        pairs += int(seen.sum())
        first += width if number < len(decode) else count
    starts[-1] = first
    arrays = {
        "slot_mapping": slots, "row": of_token, "page_table": table, "page_branch": owner, "query_start_loc": starts,
        "kv_len": [row.kv_len for row in rows], "trunk_len": [row.trunk_len for row in rows],
        "tail_start": [row.tail_start for row in rows], "first": [], **by_token,
    }  # fmt: skip
    metadata = AttentionMetadata(
        **{name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()},
        tail_bits=jnp.asarray(tail_bits), decode_rows=len(decode), decode_width=width, is_branched=True,
    )  # fmt: skip
    return LaneStep(metadata, rows, len(np.unique(np.concatenate(read))), pairs)


def slots_of(row: LaneRow, page_size: int) -> np.ndarray:
    """int [kv_len]: the slot of every lane index."""
    return (row.pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[: row.kv_len]


def visible_pairs(row: LaneRow, page_size: int) -> np.ndarray:
    """bool [Q, kv_len]: the visibility rule, written out; also the explicit mask that other kernels are given."""
    index = np.arange(row.kv_len)
    owner = row.owners[index // page_size]
    seen = (index <= row.limit[:, None]) & ((index < row.trunk_len) | (owner == row.branch[:, None]))
    seen[:, row.tail_start :] = False
    if row.tail_bits.size:
        seen[:, row.tail_start :] = row.tail_bits
    return seen


def _packed(bits: np.ndarray, count: int, words: int) -> np.ndarray:
    """uint32 [count, words] of bool [count, nodes]."""
    if not bits.size:
        return np.zeros((count, words), np.uint32)
    padded = np.pad(bits, ((0, 0), (0, words * _WORD - bits.shape[1]))).reshape(count, words, _WORD)
    return (padded.astype(np.uint64) << np.arange(_WORD, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)

"""The Branch Index Map of a lane: the owner of every slot. A view for people and tests.

The engine keeps the map per page (`page_branch`) and computes what a token sees from it and a few integers, see
kernels_pallas/visibility.py. As SpecSoT draws it, the map has an entry for each slot: -2 empty, -1 trunk, else the
branch; and a query sees the trunk and what its own branch wrote up to it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

EMPTY = -2
TRUNK = -1

_BRANCH_MARKS = string.digits + string.ascii_lowercase


def branch_index_map(page_size: int, page_branch: Sequence[int], trunk_len: int, written: Iterable[int]) -> np.ndarray:
    """Return int32 [P * page_size]: the entry of every lane index.

    Args:
        page_branch: the branch that owns each of the lane's P pages; ignored within the trunk.
        trunk_len: number of lane indices of the trunk, which are the first ones.
        written: lane indices that hold content, without those of a draft tree's tail: what a node sees is in its tail
            bits, not in owners.

    Raises:
        ValueError: content outside of the lane, or after the trunk in a page of no branch.
    """
    bim = np.full(len(page_branch) * page_size, EMPTY, np.int32)
    for index in written:
        if not 0 <= index < len(bim):
            raise ValueError(f"written: lane index {index} is outside of a lane of {len(bim)} slots")
        owner = TRUNK if index < trunk_len else page_branch[index // page_size]
        if index >= trunk_len and owner < 0:
            raise ValueError(f"written: lane index {index} is after the trunk, in a page of no branch")
        bim[index] = owner
    return bim


def bim_mask(
    bim: np.ndarray, query_bim: Sequence[int] | np.ndarray, query_index: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return bool [Q, S]: which slots the queries see.

    A slot is visible if it is the trunk's or of the query's own branch, and not after the query. (SpecSoT asks for
    the order within a branch only; for the trunk it follows, unless the query itself is one of the trunk's.)

    Args:
        bim: int32 [S].
        query_bim: int32 [Q], the entries of the queries: -1 or a branch; -2 is padding, which sees nothing.
        query_index: int32 [Q], the lane indices of the queries, or other limits of what they see.
    """
    branch, index = (np.asarray(values, np.int32)[:, None] for values in (query_bim, query_index))
    is_mine = (branch != EMPTY) & ((bim == TRUNK) | (bim == branch))
    return is_mine & (np.arange(len(bim)) <= index)


def draw_bim(bim: np.ndarray, page_size: int) -> str:
    """Draw the map as text, a line for each page, pages of the same content on one line:

    pages 0-1  ________  trunk x8
    page 2     ___000..  trunk x3, branch 0 x3, empty x2
    page 3     111.....  branch 1 x3, empty x5

    A slot is `_` in the trunk, `.` if empty, else the branch's last digit (in base 36: 0 to 9, then a to z).
    """
    lines: list[tuple[str, str, str]] = []
    for content, group in groupby(enumerate(bim.reshape(-1, page_size).tolist()), key=lambda page: page[1]):
        numbers = [number for number, _ in group]
        first, last = numbers[0], numbers[-1]
        label = f"page {first}" if first == last else f"pages {first}-{last}"
        runs = [(_name(entry), len(list(run)) * len(numbers)) for entry, run in groupby(content)]
        marks = "".join(map(_mark, content))
        lines.append((label, marks, ", ".join(f"{name} x{count}" for name, count in runs)))
    width = max((len(label) for label, _, _ in lines), default=0)
    return "\n".join(f"{label:{width}}  {marks}  {runs}" for label, marks, runs in lines)


def _name(entry: int) -> str:
    return {EMPTY: "empty", TRUNK: "trunk"}.get(entry, f"branch {entry}")


def _mark(entry: int) -> str:
    return {EMPTY: ".", TRUNK: "_"}.get(entry) or _BRANCH_MARKS[entry % len(_BRANCH_MARKS)]

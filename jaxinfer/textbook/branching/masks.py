"""Attention masks of branches in one sequence, in the form that SpecSoT's models take: added to the scores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.branching.bim import EMPTY, bim_mask
from jaxinfer.textbook.devices import Array


def newest_indices(bim: np.ndarray, query_bim: Sequence[int] | Array) -> np.ndarray:
    """Return int32 [Q], where in the sequence the queries are, if they are the newest tokens of their branches.

    SpecSoT's masks know the queries' branches only, and so cannot be causal within a branch. n queries of one branch
    are its last n tokens here, in order: its tip, or all that it has accepted.

    Args:
        bim: int32 [S], the Branch Index Map.
        query_bim: int [Q]; -1 is the prefix, and -2 padding, whose index is -1.

    Raises:
        ValueError: a branch has fewer tokens than queries.
    """
    queries = [int(branch) for branch in query_bim]
    left, places = Counter(queries), defaultdict[int, np.ndarray]()
    for branch, count in left.items():
        places[branch] = np.full(count, -1) if branch == EMPTY else np.flatnonzero(bim == branch)
        if len(places[branch]) < count:
            raise ValueError(
                f"query_bim: {count} queries of branch {branch}, which has {len(places[branch])} tokens in the sequence"
            )
    found = []
    for branch in queries:
        found.append(places[branch][len(places[branch]) - left[branch]])
        left[branch] -= 1
    return np.asarray(found, np.int32).reshape(-1)


def seen_by_newest(bim: np.ndarray, query_bim: Sequence[int] | Array) -> np.ndarray:
    """Return bool [Q, S]: what queries see that are the newest tokens of their branches, see `newest_indices`.

    It is the engine's rule: the prefix, and the query's own branch up to the query itself.
    """
    return bim_mask(bim, np.asarray(query_bim, np.int32).reshape(-1), newest_indices(bim, query_bim))


def additive_mask(seen: np.ndarray, dtype: Any) -> np.ndarray:
    """Return [1, 1, Q, S] of a floating dtype: 0 where a key is seen, else the dtype's least value; bool: `seen`.

    Raises:
        ValueError: `dtype` is neither bool nor floating.
    """
    wanted = jnp.dtype(dtype)
    if wanted == jnp.dtype(bool):
        return seen[None, None]
    if not jnp.issubdtype(wanted, jnp.floating):
        raise ValueError(f"dtype: {wanted}, allowed are bool and floating types")
    return np.where(seen, wanted.type(0), jnp.finfo(wanted).min.astype(wanted))[None, None]

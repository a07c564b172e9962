"""Caches of keys and values that are cut after a rejection, as the published loops keep them.

The functions of this package cut nothing: `language_model.Reader` tracks how much of a cache is valid, and rejected
tokens are overwritten. The engine does the same with lengths and pages.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class CutCache(Protocol):
    """A cache with a length of its own, like `jaxinfer.textbook.branching.KVCache`."""

    @property
    def current_length(self) -> int: ...

    def truncate(self, length: int) -> None: ...


type TupleCache = tuple[tuple[Any, ...] | None, ...]


def prune_cache(cache: TupleCache | CutCache | None, num_tokens_to_discard: int) -> TupleCache | CutCache | None:
    """Return a cache without its last tokens.

    Args:
        cache: None, which is returned; or for each layer None or arrays [batch, heads, length, head_dim], of which new
            tuples with shorter arrays are made; or an object with `current_length` and `truncate`, which is cut in
            place.
        num_tokens_to_discard: from 0, which keeps everything, to the cache's length.

    Raises:
        ValueError: there are fewer tokens to discard, or the number is negative.
        TypeError: the cache is of another kind.
    """
    if not isinstance(num_tokens_to_discard, int | np.integer) or num_tokens_to_discard < 0:
        raise ValueError(f"num_tokens_to_discard must be an integer of at least 0, got {num_tokens_to_discard!r}")
    if cache is None:
        return None
    if isinstance(cache, tuple):
        return tuple(
            None if layer is None else tuple(_shorter(array, num_tokens_to_discard) for array in layer)
            for layer in cache
        )
    if not (hasattr(cache, "truncate") and hasattr(cache, "current_length")):
        raise TypeError(
            f"cache must be None, a tuple of layers, or have current_length and truncate, got {type(cache).__name__}"
        )
    cache.truncate(cache.current_length - _checked(num_tokens_to_discard, cache.current_length))
    return cache


def _shorter(array: Any, count: int) -> Any:
    # A slice that ends at -0 would be empty.
    return array[:, :, : array.shape[2] - _checked(count, array.shape[2]), :]


def _checked(count: int, length: int) -> int:
    if count > length:
        raise ValueError(f"num_tokens_to_discard must be at most the cache's {length} tokens, got {count}")
    return int(count)

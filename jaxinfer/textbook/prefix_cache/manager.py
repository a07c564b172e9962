"""The source's interface between its inference loop and its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.textbook.prefix_cache.config import PrefixCacheConfig
from jaxinfer.textbook.prefix_cache.prefix_cache import PrefixCache, PrefixMatchResult
from jaxinfer.textbook.prefix_cache.stats import PrefixCacheStats


class PrefixCacheManager:
    """A prefix cache with the source's settings, for one buffer in which every sequence starts at position 0.

    A request calls `match`, prefills from `prefill_start_pos`, decodes, calls `register_prefix` with all tokens that
    were computed, and calls `release` with its `matched_prefix`.

    One buffer holds one conversation. Another one overwrites it from the first differing token on, but the source keeps
    the old sequences, and finds them again: their keys and values are then those of other tokens. Call `clear` when a
    request does not continue the buffer's contents. In the engine, each cached token has a page of its own.
    """

    def __init__(self, max_tokens: int = 65536) -> None:
        """Make an empty cache for up to `max_tokens` tokens.

        Raises:
            ValueError: `max_tokens` is not an integer of at least 1.
        """
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer of at least 1, got {max_tokens!r}")
        self._cache = PrefixCache(PrefixCacheConfig(max_cached_tokens=max_tokens))

    def match(self, tokens: Sequence[int]) -> PrefixMatchResult:
        """Return the longest cached sequence that `tokens` begins with, see `PrefixCache.match`."""
        return self._cache.match(tokens)

    def register_prefix(self, tokens: Sequence[int], kv_length: int) -> None:
        """Cache a sequence whose keys and values fill the buffer's first `kv_length` positions.

        Raises:
            ValueError: `kv_length` is not the number of tokens.
        """
        self._cache.insert(tokens, 0, kv_length)

    def extend_prefix(self, tokens: Sequence[int], new_kv_length: int) -> None:
        """Cache a sequence that has grown while it is decoded: `tokens` are all of its tokens, old and new.

        The shorter sequence stays cached beside it, as in the source, and counts too. The engine's `PrefixCache.extend`
        lets one node grow instead.

        Raises:
            ValueError: `new_kv_length` is not the number of tokens.
        """
        if new_kv_length != len(tokens):
            raise ValueError(f"new_kv_length must be the number of tokens, {len(tokens)}, got {new_kv_length}")
        self._cache.insert(tokens, 0, new_kv_length)

    def release(self, tokens: Sequence[int]) -> None:
        """Take back the reference of a match whose `matched_prefix` is `tokens`."""
        self._cache.release(tokens)

    def clear(self) -> None:
        """Remove all sequences."""
        self._cache.clear()

    def get_cached_tokens(self) -> int:
        """Return the lengths of all cached sequences, summed."""
        return self._cache.get_cached_tokens()

    def get_stats(self) -> PrefixCacheStats:
        """Return a copy of the counts."""
        return self._cache.get_stats()

    def print_stats(self) -> None:
        """Print the counts of the cache and the size of its tree."""
        print(self._cache.get_stats().to_string() + self._cache.get_tree_stats().to_string(), end="")

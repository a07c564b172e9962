"""The source's prefix cache: hits, references, eviction and counts over its radix tree."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxinfer.textbook.prefix_cache.config import PrefixCacheConfig
from jaxinfer.textbook.prefix_cache.radix_node import token_list, whole_number
from jaxinfer.textbook.prefix_cache.radix_tree import RadixTree, RadixTreeStats
from jaxinfer.textbook.prefix_cache.stats import PrefixCacheStats

_SHARE_AFTER_EVICTION = 0.8  # of max_cached_tokens; the source writes it into its code


@dataclass(frozen=True)
class PrefixMatchResult:
    """The part of a request that is cached, and the part to prefill."""

    matched_tokens: int  # tokens whose keys and values can be reused; 0 unless it is a hit
    cache_hit: bool
    prefill_start_pos: int  # index of the first token to compute
    prefill_count: int  # tokens to compute; 0 if all are cached, see `PrefixCache`
    reuse_ratio: float  # share of tokens that are reused, 0 to 1
    matched_prefix: list[int]  # the reused tokens, for `PrefixCache.release`; empty unless it is a hit


class PrefixCache:
    """A radix tree with a limit. Threads may share it: a match and its reference are one step.

    After OrinMLLM's `PrefixCache`. Beside what `RadixTree` says, kept from the source:

    - A request may match whole. Then there is nothing to prefill, and so no logits for its first new token; a caller
      matches one token less than it has. The engine's requests do that.
    - What is inserted is believed to be computed. The token that was sampled last is not: leave it out of `tokens`.
    - Eviction aims at 0.8 of `max_cached_tokens`, whatever the threshold.

    Changed from the source:

    - `insert` checks the limit after it has inserted, as the source's story of a small cache has it. Its code checks
      before, so that the newest sequence may exceed the limit. Other sequences are evicted first, the new one only if
      the cache is still above `max_cached_tokens`. After that, only sequences in use and their cached beginnings can
      exceed the limit.
    - The source finds a prefix and references it in two steps, between which another thread may evict it.
    """

    def __init__(self, config: PrefixCacheConfig | None = None) -> None:
        """Make an empty cache; `config` None: the source's settings."""
        self.config = PrefixCacheConfig() if config is None else config
        self._tree = RadixTree()
        self._stats = PrefixCacheStats()
        self._lock = threading.RLock()

    def match(self, tokens: Sequence[int]) -> PrefixMatchResult:
        """Return the longest cached sequence that `tokens` begins with, and take a reference on it if it is a hit.

        A hit has at least `min_prefix_length` tokens. A request without tokens is no hit, and is not counted.
        """
        tokens = token_list(tokens)
        if not tokens:
            return PrefixMatchResult(0, False, 0, 0, 0.0, [])
        with self._lock:
            found = self._tree.find_longest_prefix(tokens)
            is_hit = found.has_kv_cache() and found.matched_length >= self.config.min_prefix_length
            matched = found.matched_length if is_hit else 0
            result = PrefixMatchResult(
                matched_tokens=matched,
                cache_hit=is_hit,
                prefill_start_pos=matched,
                prefill_count=len(tokens) - matched,
                reuse_ratio=matched / len(tokens),
                matched_prefix=tokens[:matched],
            )
            if is_hit:
                self._tree.add_reference(result.matched_prefix)
            if self.config.enable_stats:
                self._count(result)
            return result

    def insert(self, tokens: Sequence[int], kv_start_pos: int, kv_length: int) -> None:
        """Cache a sequence, and evict others if the cache is above `eviction_threshold` now.

        Args:
            tokens: the token ids from the first of the sequence on; an empty sequence is not cached.
            kv_start_pos: index of the buffer's position that holds the keys and values of the first token.
            kv_length: positions, as many as tokens.

        Raises:
            ValueError: `kv_start_pos` is not an integer of at least 0, or `kv_length` is not the number of tokens.
        """
        tokens = token_list(tokens)
        if not tokens and kv_length == 0:
            return
        with self._lock:
            self._tree.insert(tokens, kv_start_pos, kv_length)
            if self.config.enable_auto_eviction and self.get_usage_ratio() > self.config.eviction_threshold:
                self._evict_after(tokens)

    def release(self, tokens: Sequence[int]) -> None:
        """Take back the reference of a match whose `matched_prefix` is `tokens`.

        Nothing happens if there is no such reference, as for a request without a hit, or after `remove` and `clear`.
        """
        with self._lock:
            self._tree.release_reference(tokens)

    def remove(self, tokens: Sequence[int]) -> bool:
        """Remove exactly this sequence, even if it is referenced; False if it is not cached."""
        with self._lock:
            return self._tree.remove(tokens)

    def clear(self) -> None:
        """Remove all sequences, even if they are referenced. The counts continue."""
        with self._lock:
            self._tree.clear()

    def evict(self, target_tokens: int) -> int:
        """Evict until at most `target_tokens` tokens are cached, or only sequences in use and their beginnings are.

        The engine's `evict_to_tokens` does this, and its `evict_pages` frees so many pages.

        Returns:
            The lengths of the evicted sequences, summed.

        Raises:
            ValueError: `target_tokens` is not an integer of at least 0.
        """
        target_tokens = whole_number("target_tokens", target_tokens)
        with self._lock:
            evicted = self._tree.evict_lru(target_tokens)
            if evicted and self.config.enable_stats:
                self._stats.eviction_count += 1
                self._stats.tokens_evicted += evicted
            return evicted

    def get_cached_tokens(self) -> int:
        """Return the lengths of all cached sequences, summed."""
        return self._tree.total_cached_tokens

    def get_usage_ratio(self) -> float:
        """Return the cached tokens as a share of `max_cached_tokens`; above 1 if the cache is above its limit."""
        return self.get_cached_tokens() / self.config.max_cached_tokens

    def get_stats(self) -> PrefixCacheStats:
        """Return a copy of the counts."""
        with self._lock:
            return replace(self._stats)

    def get_tree_stats(self) -> RadixTreeStats:
        """Return the size of the tree."""
        return self._tree.get_stats()

    def dump_tree(self) -> str:
        """Draw the tree, see `RadixTree.dump`."""
        return self._tree.dump()

    def _evict_after(self, tokens: list[int]) -> None:
        """Evict others than `tokens` down to 0.8 of the limit; `tokens` too if the cache is above the limit then."""
        self._tree.add_reference(tokens)
        self.evict(int(self.config.max_cached_tokens * _SHARE_AFTER_EVICTION))
        self._tree.release_reference(tokens)
        self.evict(self.config.max_cached_tokens)

    def _count(self, result: PrefixMatchResult) -> None:
        stats = self._stats
        stats.total_requests += 1
        stats.cache_hits += result.cache_hit
        stats.cache_misses += not result.cache_hit
        stats.total_tokens_processed += result.matched_tokens + result.prefill_count
        stats.tokens_reused += result.matched_tokens
        stats.tokens_computed += result.prefill_count

"""Counts of the source's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Counts since the cache was created. Rates are shares, 0 to 1."""

    total_requests: int = 0  # matches of at least one token
    cache_hits: int = 0  # requests that reuse at least `min_prefix_length` tokens
    cache_misses: int = 0  # the other requests
    total_tokens_processed: int = 0  # tokens of all requests
    tokens_reused: int = 0  # tokens whose keys and values were cached
    tokens_computed: int = 0  # the other tokens
    eviction_count: int = 0  # evictions of at least one sequence
    tokens_evicted: int = 0  # lengths of evicted sequences, summed

    def hit_rate(self) -> float:
        """Return the share of requests that were hits; 0 before the first request."""
        return self.cache_hits / self.total_requests if self.total_requests else 0.0

    def reuse_rate(self) -> float:
        """Return the share of tokens that were reused; 0 before the first request."""
        return self.tokens_reused / self.total_tokens_processed if self.total_tokens_processed else 0.0

    def to_string(self) -> str:
        """Return the counts, a line each, as the source prints them; percentages have six significant digits."""
        return (
            "PrefixCache Stats:\n"
            f"  Total requests: {self.total_requests}\n"
            f"  Cache hits: {self.cache_hits} ({100 * self.hit_rate():g}%)\n"
            f"  Cache misses: {self.cache_misses}\n"
            f"  Total tokens: {self.total_tokens_processed}\n"
            f"  Tokens reused: {self.tokens_reused} ({100 * self.reuse_rate():g}%)\n"
            f"  Tokens computed: {self.tokens_computed}\n"
            f"  Evictions: {self.eviction_count}\n"
            f"  Tokens evicted: {self.tokens_evicted}\n"
        )

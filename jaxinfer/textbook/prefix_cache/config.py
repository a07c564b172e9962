"""Settings of the source's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.field_checks import check_positive_integer


@dataclass(frozen=True)
class PrefixCacheConfig:
    """Size of the cache, what counts as a hit, when it evicts, and whether it counts.

    The engine's `CacheConfig` has no counterpart of the last four: a shared page costs nothing, so every page is worth
    sharing; pages are evicted when a request needs them; and counting is always on.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    max_cached_tokens: int = 65536  # at least 1
    min_prefix_length: int = 4  # the fewest tokens that are a hit; at least 1
    enable_auto_eviction: bool = True  # False: `insert` never evicts, and the cache may grow beyond max_cached_tokens
    eviction_threshold: float = 0.9  # share of max_cached_tokens above which `insert` evicts; above 0, at most 1
    enable_stats: bool = True  # False: all counts stay 0

    def __post_init__(self) -> None:
        check_positive_integer("max_cached_tokens", self.max_cached_tokens)
        check_positive_integer("min_prefix_length", self.min_prefix_length)
        for name in ("enable_auto_eviction", "enable_stats"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        threshold = self.eviction_threshold
        if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not 0 < threshold <= 1:
            raise ValueError(f"eviction_threshold must be a number above 0 and at most 1, got {threshold!r}")

"""The prefix cache and the radix tree of OrinMLLM under their own names: sequences with places in one buffer.

`jaxinfer.cache` is what the engine uses. It differs where the source is at fault; each module says where.
"""

from jaxinfer.textbook.prefix_cache.config import PrefixCacheConfig
from jaxinfer.textbook.prefix_cache.manager import PrefixCacheManager
from jaxinfer.textbook.prefix_cache.prefix_cache import PrefixCache, PrefixMatchResult
from jaxinfer.textbook.prefix_cache.radix_node import KVCacheInfo, RadixMatchResult, RadixNode
from jaxinfer.textbook.prefix_cache.radix_tree import RadixTree, RadixTreeStats
from jaxinfer.textbook.prefix_cache.stats import PrefixCacheStats

__all__ = [
    "KVCacheInfo",
    "PrefixCache",
    "PrefixCacheConfig",
    "PrefixCacheManager",
    "PrefixCacheStats",
    "PrefixMatchResult",
    "RadixMatchResult",
    "RadixNode",
    "RadixTree",
    "RadixTreeStats",
]

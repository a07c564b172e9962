"""The host's time for the radix prefix cache, by length of a sequence and size of the tree; no device takes part.

Sequences of the tree share no prefix, so the root has a child for each. Each row of the table matches and inserts
sequences of its length; a match ends inside an edge and splits it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.bench.environment import describe_environment
from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import CacheConfig, PrefixCache

PAGE_SIZE = 16
LENGTHS = (1024, 4096, 16384, 32768, 65536)
SEQUENCES = (10, 1000, 10000)
BACKGROUND_TOKENS = 256  # of every sequence that fills the tree
EVICTED_PAGES = 1000
EVICTION_TREES = ((1000, 256), (10000, 256), (10000, 16))  # sequences, tokens of each; 16: a node for every page
EXTENSIONS = 64  # pages published one by one after a sequence of the row's length


def milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def tokens_of(index: int, length: int) -> list[int]:
    """A sequence that differs from all others in its first page."""
    return [index, *((index * 7919 + i) % 150000 for i in range(length - 1))]


def publish(cache: PrefixCache, tokens: list[int]) -> None:
    cache.insert(tokens, cache.allocator.allocate(len(tokens) // PAGE_SIZE))


def make_cache(num_sequences: int, length: int) -> PrefixCache:
    """A cache that holds `num_sequences` sequences of `length` tokens."""
    pages = num_sequences * length // PAGE_SIZE + 4 * max(LENGTHS) // PAGE_SIZE
    cache = PrefixCache(CacheConfig(page_size=PAGE_SIZE), PageAllocator(pages))
    for index in range(num_sequences):
        publish(cache, tokens_of(index, length))
    return cache


def measure_length(cache: PrefixCache, length: int, first: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of one match and one insertion of `length` tokens, and of publishing one page after it."""
    inserts, matches, extensions = [], [], []
    for index in range(first, first + rounds):
        tokens = tokens_of(index, length)
        pages = cache.allocator.allocate(length // PAGE_SIZE)
        inserts.append(milliseconds(lambda t=tokens, p=pages: cache.insert(t, p)))
        half = [*tokens[: length // 2], *([-1] * (length // 2))]
        results = []
        for wanted in (half, tokens):  # the first one splits the edge
            matches.append(milliseconds(lambda w=wanted, r=results: r.append(cache.match_and_lock(w))))
        handle = results[1].handle
        new = list(range(PAGE_SIZE))
        for page in cache.allocator.allocate(EXTENSIONS):
            extensions.append(milliseconds(lambda h=handle, n=new, p=page: cache.extend(h, n, [p])))
        for result in results:
            cache.release(result.handle)
        cache.remove(tokens + new * EXTENSIONS)
    return {
        "insert_ms": statistics.median(inserts),
        "match_ms": statistics.median(matches),
        "extend_us": 1e3 * statistics.median(extensions),
    }


def measure_eviction(num_sequences: int, length: int) -> dict[str, float]:
    """Milliseconds to evict from a tree that was not used since, and from one that was used all over, in an order
    that leaves nothing of the queue's as it was."""
    cache = make_cache(num_sequences, length)
    fresh = milliseconds(lambda: cache.evict_pages(EVICTED_PAGES))
    for index in range(num_sequences - 1, -1, -1):
        cache.release(cache.match_and_lock(tokens_of(index, length)).handle)
    used = milliseconds(lambda: cache.evict_pages(EVICTED_PAGES))
    cache.check_integrity()
    return {"evict_ms": fresh, "evict_after_use_ms": used}


def run(rounds: int) -> dict[str, Any]:
    rows = []
    for num_sequences in SEQUENCES:
        cache = make_cache(num_sequences, BACKGROUND_TOKENS)
        for length in LENGTHS:
            figures = measure_length(cache, length, num_sequences, rounds)
            rows.append({"sequences": num_sequences, "tokens": length, **figures})
        cache.check_integrity()
    evictions = [
        {"sequences": count, "tokens": length, "pages": EVICTED_PAGES, **measure_eviction(count, length)}
        for count, length in EVICTION_TREES
    ]
    return {"page_size": PAGE_SIZE, "rounds": rounds, "sequences": rows, "evictions": evictions}


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "| sequences in the tree | tokens | match, ms | insert, ms | extend by a page, us |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in results["sequences"]:
        lines.append(
            f"| {row['sequences']:,} | {row['tokens']:,} | {row['match_ms']:.3f} | {row['insert_ms']:.3f} "
            f"| {row['extend_us']:.1f} |"
        )
    lines += [
        "",
        "| sequences in the tree | tokens of each | pages evicted | as inserted, ms | after all were used, ms |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in results["evictions"]:
        lines.append(
            f"| {row['sequences']:,} | {row['tokens']:,} | {row['pages']:,} | {row['evict_ms']:.2f} "
            f"| {row['evict_after_use_ms']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="sequences measured for every row (default 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    results = run(options.rounds)
    print(markdown(results))
    if options.json is not None:
        report = {"environment": describe_environment(), **results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How long a launch takes: warmed up, repeated without waiting for the device, the median of several rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Timing:
    """Seconds of one launch: the median and the best of some rounds, and of the first launch, which compiles."""

    median_s: float
    best_s: float
    rounds: int
    launches: int  # in each round
    first_s: float

    def row(self, per_launch: int = 1) -> dict[str, Any]:
        """For a result: milliseconds of each of the `per_launch` equal pieces of work of a launch."""
        return {
            "ms": 1e3 * self.median_s / per_launch,
            "best_ms": 1e3 * self.best_s / per_launch,
            "rounds": self.rounds,
            "launches": self.launches,
            "first_call_s": self.first_s,
        }


def time_launches(
    launch: Callable[[], Any], *, rounds: int = 5, round_s: float = 0.1, most_launches: int = 2000
) -> Timing:
    """Time `launch`, which returns arrays of the device without waiting for them.

    A round is so many launches that it takes about `round_s`, at least one; only its end waits for the device. Launches
    run in the order in which they were made, so the last one's arrays stand for all.
    """
    first = _seconds(launch, 1)
    # The second launch may still load something; the third is what the others will be like.
    _seconds(launch, 1)
    estimate = _seconds(launch, 1)
    count = min(most_launches, max(1, round(round_s / max(estimate, 1e-6))))
    if count > 1:
        # Launches that overlap with the host take less than one that is waited for.
        estimate = _seconds(launch, count) / count
        count = min(most_launches, max(1, round(round_s / max(estimate, 1e-6))))
    times = [_seconds(launch, count) / count for _ in range(rounds)]
    return Timing(statistics.median(times), min(times), rounds, count, first)


def _seconds(launch: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    result = None
    for _ in range(count):
        result = launch()
    jax.block_until_ready(result)
    return time.perf_counter() - begin

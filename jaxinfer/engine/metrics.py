"""Counters, gauges and histograms of an engine, under vLLM's names without prefix."""

from __future__ import annotations

import bisect
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from jaxinfer.constraints.guard import Walk
from jaxinfer.scheduling.scheduler_output import Landing

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0
# Upper ends of the buckets, in seconds: from a fast GPU's step to a slow CPU's prompt.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
# Counters whose customary names do not end in _total.
_COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)


@dataclass
class Histogram:
    """Counts of values by bucket; the last count is of values above every bound."""

    bounds: tuple[float, ...] = _SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    sum: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean of all observations; 0 before the first one."""
        return self.sum / max(1, self.count)


@dataclass
class EngineMetrics:
    """The metrics of an engine, as `llm.get_metrics()` returns them. Totals count since the engine started."""

    num_requests_running: int = 0  # running requests
    num_requests_waiting: int = 0  # waiting requests
    branch_count: int = 0  # running requests that are samples, branches or beams of one request
    kv_cache_usage_perc: float = 0.0  # share of pages in use by requests, 0 to 1
    num_cached_tokens: int = 0  # in the prefix cache, in use or not
    prefix_cache_queries: int = 0  # tokens that were looked for in the prefix cache
    prefix_cache_hits: int = 0  # tokens of these that were found
    prompt_tokens_total: int = 0  # tokens of prompts
    generation_tokens_total: int = 0  # tokens of outputs
    num_preemptions_total: int = 0  # preemptions
    num_compiles_total: int = 0  # compiles
    num_compiles_after_warm_up_total: int = 0  # compiles after warm-up
    num_steps_total: int = 0  # device steps; a decode loop runs several in one launch
    num_launches_total: int = 0  # launches
    num_step_failures_total: int = 0  # steps that raised, after which the engine recovered
    num_raised_steps_total: int = 0  # steps of `AsyncLLM` that raised although the engine recovers
    num_recoveries_total: int = 0  # recoveries: what had not landed is computed again
    scheduled_rows_total: int = 0  # rows summed over steps: divided by steps, the average batch
    scheduled_tokens_total: int = 0  # tokens summed over steps
    spec_decode_num_drafts: int = 0  # rounds of requests in which tokens were drafted
    spec_decode_num_draft_tokens: int = 0  # drafted tokens
    spec_decode_num_accepted_tokens: int = 0  # accepted tokens
    spec_decode_num_accepted_tokens_per_pos: list[int] = field(default_factory=list)  # accepted tokens by position
    constraint_refusals_total: int = 0  # drawn tokens that a constraint refused, so that they were drawn again
    constraint_dropped_tokens_total: int = 0  # drawn tokens that were dropped: refused ones, and what came after them
    constraint_forced_tokens_total: int = 0  # tokens that were not drawn, because nothing else could follow
    diffusion_forwards_total: int = 0  # rounds of denoising, of each request
    diffusion_tokens_total: int = 0  # tokens of these rounds that landed
    diffusion_tokens_per_forward: float = 0.0  # tokens per round, a gauge
    weights_version: str = "0"  # of the weights, as text
    num_weights_updates_total: int = 0  # updates of weights
    weights_update_seconds_total: float = 0.0  # spent on them, the landing of launches in flight apart
    host_seconds_total: float = 0.0  # spent by scheduler, batch building and accounting
    time_to_first_token_seconds: Histogram = field(
        default_factory=Histogram
    )  # from a request's arrival to its first token
    inter_token_latency_seconds: Histogram = field(default_factory=Histogram)  # between tokens of a request

    def copy(self) -> EngineMetrics:
        """Return the metrics as they are now, which later steps do not change."""
        return copy.deepcopy(self)

    def count_drafts(self, drafted: np.ndarray, accepted: np.ndarray, proposed: np.ndarray) -> None:
        """Account for drafting rounds of requests, in integers of any shape: tokens drafted one after the other, how
        many of these were accepted, and all that were proposed, other branches of a tree included."""
        self.spec_decode_num_drafts += int((drafted > 0).sum())
        self.spec_decode_num_draft_tokens += int(proposed.sum())
        self.spec_decode_num_accepted_tokens += int(accepted.sum())
        per_position = self.spec_decode_num_accepted_tokens_per_pos
        per_position += [0] * (int(drafted.max(initial=0)) - len(per_position))
        for position in range(int(accepted.max(initial=0))):
            per_position[position] += int((accepted > position).sum())

    def count_walk(self, walk: Walk, num_drawn: int) -> None:
        """Account for a walk along drawn tokens of a constrained request."""
        self.constraint_refusals_total += walk.is_refused
        self.constraint_dropped_tokens_total += num_drawn - walk.num_kept
        self.constraint_forced_tokens_total += len(walk.forced)

    def count_landings(self, landings: Sequence[Landing], now: float) -> None:
        """Account for tokens that landed at `now`."""
        # Most requests got their previous tokens at the same moment, so there are few different gaps.
        gaps: dict[tuple[float, int], int] = {}
        before, count, rows = 0.0, 0, 0
        generated = 0
        for request, first, last in landings:
            if first == last:
                continue  # it ended without a further token, or landed only tokens that it had
            times = request.metrics
            generated += last - first
            if first == request.num_prompt_tokens:
                self.prompt_tokens_total += first
                self.time_to_first_token_seconds.observe(now - times.arrival_time)
                times.first_token_time = now
            elif times.last_token_time == before and last - first == count:
                rows += 1
            elif times.last_token_time is not None:
                gaps[before, count] = gaps.get((before, count), 0) + rows
                before, count, rows = times.last_token_time, last - first, 1
            times.last_token_time = now
        gaps[before, count] = gaps.get((before, count), 0) + rows
        self.generation_tokens_total += generated
        for (before, count), rows in gaps.items():
            if rows:
                self.inter_token_latency_seconds.observe((now - before) / count, count * rows)

    def count_rounds(self, *, forwards: int, tokens: int) -> None:
        """Account for rounds of denoising: forwards of requests, and tokens that landed."""
        self.diffusion_forwards_total += forwards
        self.diffusion_tokens_total += tokens
        self.diffusion_tokens_per_forward = self.diffusion_tokens_total / max(1, self.diffusion_forwards_total)

    @property
    def average_batch(self) -> float:
        """Rows per step."""
        return self.scheduled_rows_total / max(1, self.num_steps_total)

    def prometheus(self) -> str:
        """Return all metrics in Prometheus' text format, as jaxinfer:NAME."""
        lines = []
        for item in fields(self):
            value, name = getattr(self, item.name), f"jaxinfer:{item.name}"
            if isinstance(value, Histogram):
                lines.append(f"# TYPE {name} histogram")
                total = 0
                for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
                    total += count
                    lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
                lines += [f"{name}_sum {value.sum}", f"{name}_count {total}"]
            elif isinstance(value, str):
                lines += [f"# TYPE {name} gauge", f'{name}{{version="{escaped_label(value)}"}} 1']
            elif isinstance(value, list):
                lines.append(f"# TYPE {name} counter")
                lines += [f'{name}{{position="{place}"}} {count}' for place, count in enumerate(value)]
            else:
                kind = "counter" if item.name.endswith("_total") or item.name in _COUNTERS else "gauge"
                lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


def escaped_label(value: str) -> str:
    """Return the value of a label as Prometheus' text format has it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class ProgressLog:
    """A log line every LOG_INTERVAL_SECONDS of work: throughput since the last one, and how full the engine is."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def tick(self, get_metrics: Callable[[], EngineMetrics], now: float) -> None:
        """Write the line if it is due; `now` is in seconds of a monotonic clock."""
        if self._time is not None and now - self._time < LOG_INTERVAL_SECONDS:
            return
        metrics = get_metrics()
        if self._time is not None:
            seconds = now - self._time
            logger.info(
                "prompt %.1f tok/s, generation %.1f tok/s, running %d, waiting %d, KV pages in use %.1f%%, "
                "prompt tokens found in the cache %.1f%%",
                (metrics.prompt_tokens_total - self._prompt_tokens) / seconds,
                (metrics.generation_tokens_total - self._generation_tokens) / seconds,
                metrics.num_requests_running,
                metrics.num_requests_waiting,
                100 * metrics.kv_cache_usage_perc,
                100 * metrics.prefix_cache_hits / max(1, metrics.prefix_cache_queries),
            )
        self._time = now
        self._prompt_tokens, self._generation_tokens = metrics.prompt_tokens_total, metrics.generation_tokens_total

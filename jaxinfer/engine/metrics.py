"""Counters and gauges of an engine, under vLLM's names without prefix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineMetrics:
    """What `llm.get_metrics()` returns. Totals count since the engine started."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0  # share of pages in use, 0 to 1
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    num_preemptions_total: int = 0
    num_compiles_total: int = 0
    num_steps_total: int = 0
    scheduled_rows_total: int = 0  # rows summed over steps: divided by steps, the average batch
    scheduled_tokens_total: int = 0

    @property
    def average_batch(self) -> float:
        """Rows per step."""
        return self.scheduled_rows_total / max(1, self.num_steps_total)

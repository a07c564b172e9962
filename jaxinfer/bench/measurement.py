"""Measurements of one run of a workload: exact latencies, and the engine's counters over the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.bench.summary import RunFigures, Summary
from jaxinfer.engine.metrics import Histogram
from jaxinfer.llm import LLM


@dataclass
class RecordingHistogram(Histogram):
    """A histogram that also keeps its observations, for exact percentiles."""

    values: list[float] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def observe(self, value: float, times: int = 1) -> None:
        super().observe(value, times)
        self.values.append(value)
        self.times.append(times)

    def summary(self) -> Summary | None:
        return Summary.of(self.values, self.times)


@dataclass(frozen=True)
class Measurement(RunFigures):
    """Figures of one run of a workload.

    Latencies are in seconds. Time to first token counts from a request's arrival. The inter-token latency of tokens
    that land together is the time since the previous landing, divided by their number.
    """

    time_to_first_token: Summary | None
    inter_token_latency: Summary | None
    steps: int
    launches: int
    mean_batch: float  # rows per step
    host_ms_per_step: float  # scheduler, batch building, launching and accounting
    preemptions: int
    compiles: int


@dataclass
class Recorder:
    """Latencies that the engine records while this is in place, and its counters from before."""

    llm: LLM
    before: dict[str, Any]
    time_to_first_token: RecordingHistogram
    inter_token_latency: RecordingHistogram

    def measurement(self, *, num_requests: int, prompt_tokens: int, output_tokens: int, seconds: float) -> Measurement:
        """Return the measurement of the run since the recorder was put in place."""
        metrics = self.llm.get_metrics()

        def since(name: str) -> Any:
            return getattr(metrics, name) - self.before[name]

        steps = since("num_steps_total")
        return Measurement(
            num_requests=num_requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seconds=seconds,
            time_to_first_token=self.time_to_first_token.summary(),
            inter_token_latency=self.inter_token_latency.summary(),
            steps=steps,
            launches=since("num_launches_total"),
            mean_batch=since("scheduled_rows_total") / max(1, steps),
            host_ms_per_step=1000 * since("host_seconds_total") / max(1, steps),
            preemptions=since("num_preemptions_total"),
            compiles=since("num_compiles_total"),
        )


_COUNTERS = ("num_steps_total", "num_launches_total", "scheduled_rows_total", "host_seconds_total",
             "num_preemptions_total", "num_compiles_total")  # fmt: skip


@contextlib.contextmanager
def recording(llm: LLM) -> Iterator[Recorder]:
    """Record latencies and counters from here on; the engine's own histograms miss observations meanwhile."""
    metrics = llm.core.metrics
    own = metrics.time_to_first_token_seconds, metrics.inter_token_latency_seconds
    before = {name: getattr(metrics, name) for name in _COUNTERS}
    recorder = Recorder(llm, before, RecordingHistogram(), RecordingHistogram())
    metrics.time_to_first_token_seconds = recorder.time_to_first_token
    metrics.inter_token_latency_seconds = recorder.inter_token_latency
    try:
        yield recorder
    finally:
        metrics.time_to_first_token_seconds, metrics.inter_token_latency_seconds = own

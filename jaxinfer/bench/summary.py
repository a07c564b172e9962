"""Figures of any run: mean and percentiles of observations, and rates. Importing this module loads no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Summary:
    """Mean and percentiles of observations, in their unit."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float], times: Sequence[int] | None = None) -> Summary | None:
        """Summarise `values`, value i counted `times[i]` times; None where there are none.

        Percentiles between two observations are interpolated linearly.
        """
        observations = np.repeat(values, 1 if times is None else times)
        if not len(observations):
            return None
        return cls(float(observations.mean()), *np.percentile(observations, (50, 90, 95, 99)).tolist())


@dataclass(frozen=True)
class RunFigures:
    """The size of one run of a workload, and how long it took."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return all fields and rates, for a JSON file."""
        rates = ("output_tokens_per_second", "total_tokens_per_second", "requests_per_second")
        return asdict(self) | {name: getattr(self, name) for name in rates}

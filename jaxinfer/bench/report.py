"""Measurements as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer.bench.measurement import Measurement, Summary

MILLISECONDS = "ms: mean / p50 / p95 / p99"


def milliseconds(summary: Summary | None) -> str:
    """Format a summary in seconds as milliseconds, in the order of MILLISECONDS; "-" without observations."""
    if summary is None:
        return "-"
    return " / ".join(f"{1000 * value:.2f}" for value in (summary.mean, summary.p50, summary.p95, summary.p99))


def measurement_table(measured: Measurement, *, title: str) -> Table:
    """Return the table of one run, with a row for each quantity."""
    table = Table("quantity", "value", title=title, title_justify="left")
    rows = {
        "requests": f"{measured.num_requests}",
        "prompt tokens": f"{measured.prompt_tokens}",
        "output tokens": f"{measured.output_tokens}",
        "seconds": f"{measured.seconds:.2f}",
        "output tokens per second": f"{measured.output_tokens_per_second:.1f}",
        "total tokens per second": f"{measured.total_tokens_per_second:.1f}",
        "requests per second": f"{measured.requests_per_second:.2f}",
        f"time to first token, {MILLISECONDS}": milliseconds(measured.time_to_first_token),
        f"inter-token latency, {MILLISECONDS}": milliseconds(measured.inter_token_latency),
        "steps": f"{measured.steps} in {measured.launches} launches",
        "mean batch": f"{measured.mean_batch:.1f}",
        "host time per step, ms": f"{measured.host_ms_per_step:.3f}",
        "preemptions": f"{measured.preemptions}",
        "compiles": f"{measured.compiles}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def show(table: Table, result: dict[str, Any], file: str | os.PathLike[str] | None) -> None:
    """Print the table and, if a file is given, write the result to it."""
    Console().print(table)
    if file is not None:
        Path(file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

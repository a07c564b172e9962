"""Measurements as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxinfer.bench.summary import RunFigures, Summary

if TYPE_CHECKING:  # it loads the engine, which a benchmark of a server elsewhere does without
    from jaxinfer.bench.measurement import Measurement
    from jaxinfer.bench.served import ServedMeasurement

MILLISECONDS = "ms: mean / p50 / p90 / p95 / p99"


def milliseconds(summary: Summary | None) -> str:
    """Format a summary in seconds as milliseconds, in the order of MILLISECONDS; "-" without observations."""
    if summary is None:
        return "-"
    return " / ".join(f"{1000 * value:.2f}" for value in astuple(summary))


def measurement_table(measured: Measurement, *, title: str) -> Table:
    """Return the table of one run, with a row for each quantity."""
    return _table(title, _size_and_rates(measured) | {
        f"time to first token, {MILLISECONDS}": milliseconds(measured.time_to_first_token),
        f"inter-token latency, {MILLISECONDS}": milliseconds(measured.inter_token_latency),
        "steps": f"{measured.steps} in {measured.launches} launches",
        "mean batch": f"{measured.mean_batch:.1f}",
        "host time per step, ms": f"{measured.host_ms_per_step:.3f}",
        "preemptions": f"{measured.preemptions}",
        "compiles": f"{measured.compiles}",
    })  # fmt: skip


def served_table(measured: ServedMeasurement, *, title: str) -> Table:
    """Return the table of one run against a server, with a row for each quantity and each kind of error."""
    rows = _size_and_rates(measured) | {
        "prompt tokens that were cached": f"{measured.cached_tokens}",
        f"time to first token, {MILLISECONDS}": milliseconds(measured.time_to_first_token),
        f"time per output token, {MILLISECONDS}": milliseconds(measured.time_per_output_token),
        f"inter-token latency, {MILLISECONDS}": milliseconds(measured.inter_token_latency),
        f"time between pieces, {MILLISECONDS}": milliseconds(measured.time_between_pieces),
        f"whole request, {MILLISECONDS}": milliseconds(measured.latency),
        "failed requests": f"{measured.num_failed}",
    }
    return _table(title, rows | {f"  {error}": f"{count}" for error, count in measured.errors.items()})


def _size_and_rates(measured: RunFigures) -> dict[str, str]:
    return {
        "requests": f"{measured.num_requests}",
        "prompt tokens": f"{measured.prompt_tokens}",
        "output tokens": f"{measured.output_tokens}",
        "seconds": f"{measured.seconds:.2f}",
        "output tokens per second": f"{measured.output_tokens_per_second:.1f}",
        "total tokens per second": f"{measured.total_tokens_per_second:.1f}",
        "requests per second": f"{measured.requests_per_second:.2f}",
    }


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table("quantity", "value", title=title, title_justify="left")
    for name, value in rows.items():
        table.add_row(escape(name), escape(value))
    return table


def show(table: Table, result: dict[str, Any], file: str | os.PathLike[str] | None) -> None:
    """Print the table and, if a file is given, write the result to it."""
    Console().print(table)
    if file is not None:
        Path(file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

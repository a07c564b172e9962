"""Streamed text with marks around tokens that a constraint has changed or forced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from jaxinfer.cli.marked_stream import print_marked
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.token_marks import FORCED, REDRAWN
from jaxinfer.tokenizer import Tokenizer


def print_constraints(
    deltas: Iterable[RequestOutput], tokenizer: Tokenizer, out: TextIO | None = None
) -> RequestOutput:
    """Print a stream that has token sources: tokens that were drawn again in yellow or {braces}, forced ones in cyan or
    [brackets]; returns the last output."""
    return print_marked(deltas, tokenizer, (REDRAWN, FORCED), out)


def constraints_line(metrics: EngineMetrics) -> str:
    """Return a line on what the grammar has cost."""
    return (
        f"{metrics.constraint_refusals_total} tokens drawn again, {metrics.constraint_forced_tokens_total} forced, "
        f"{metrics.constraint_dropped_tokens_total} dropped"
    )

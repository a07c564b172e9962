"""Streamed text with marks around tokens that a constraint has changed or forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from jaxinfer.cli.marked_stream import FORCED, REDRAWN, Mark, print_marked
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import Landing


@contextmanager
def _watched(llm: LLM) -> Iterator[list[Request]]:
    """Collect the requests of an engine as they land."""
    seen: list[Request] = []

    def listen(landings: Sequence[Landing]) -> None:
        seen.extend(landing.request for landing in landings if landing.request not in seen)

    llm.core.landing_listeners.append(listen)
    try:
        yield seen
    finally:
        llm.core.landing_listeners.remove(listen)


def print_constraints(llm: LLM, stream: Iterator[RequestOutput], out: TextIO | None = None) -> RequestOutput:
    """Print the stream of one request: tokens that were drawn again in yellow or {braces}, forced ones in cyan or
    [brackets]; returns the last output."""
    with _watched(llm) as seen:

        def marks_of(count: int, tokens: Sequence[int]) -> list[Mark | None]:
            [request] = seen
            return [
                REDRAWN if index in request.redrawn_at else FORCED if index in request.forced_at else None
                for index in range(count, count + len(tokens))
            ]

        return print_marked(stream, llm.get_tokenizer(), marks_of, out)


def constraints_line(llm: LLM) -> str:
    """Return a line on what the grammar has cost."""
    metrics = llm.get_metrics()
    return (
        f"{metrics.constraint_refusals_total} tokens drawn again, {metrics.constraint_forced_tokens_total} forced, "
        f"{metrics.constraint_dropped_tokens_total} dropped"
    )

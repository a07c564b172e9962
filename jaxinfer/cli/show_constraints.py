"""Streamed text in which tokens that a constraint has changed or forced have colours, or else brackets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import Landing

_REDRAWN, _FORCED, _PLAIN = "\x1b[33m", "\x1b[36m", "\x1b[0m"


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
    to: TextIO = sys.stdout if out is None else out
    in_colour = to.isatty() and "NO_COLOR" not in os.environ
    marks = {"redrawn": ("{", "}"), "forced": ("[", "]")}
    if in_colour:
        marks = {"redrawn": (_REDRAWN, _PLAIN), "forced": (_FORCED, _PLAIN)}
    text, count = None, 0
    with _watched(llm) as seen:
        for output in stream:
            if text is None:
                text = llm.get_tokenizer().stream(output.prompt_token_ids, skip_special_tokens=True)
            [request] = seen
            for token in output.outputs[0].token_ids:
                kind = "redrawn" if count in request.redrawn_at else "forced" if count in request.forced_at else None
                begin, end = ("", "") if kind is None else marks[kind]
                piece = text.append(token)
                to.write(f"{begin}{piece}{end}" if piece else "")
                count += 1
            if output.finished:
                to.write(text.finish())
            to.flush()
    to.write("\n")
    return output


def constraints_line(llm: LLM) -> str:
    """Return a line on what the grammar has cost."""
    metrics = llm.get_metrics()
    return (
        f"{metrics.constraint_refusals_total} tokens drawn again, {metrics.constraint_forced_tokens_total} forced, "
        f"{metrics.constraint_dropped_tokens_total} dropped"
    )

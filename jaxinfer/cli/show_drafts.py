"""Streamed text with marks around accepted drafts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from jaxinfer.cli.marked_stream import print_marked
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.token_marks import DRAFT
from jaxinfer.tokenizer import Tokenizer


def print_drafts(deltas: Iterable[RequestOutput], tokenizer: Tokenizer, out: TextIO | None = None) -> RequestOutput:
    """Print a stream that has token sources with its accepted drafts marked; returns the last output."""
    return print_marked(deltas, tokenizer, (DRAFT,), out)


def drafts_line(output: RequestOutput) -> str:
    """Return a line on how many of a request's drafts were accepted."""
    own = output.metrics
    if own is None or not own.num_drafts:
        return "nothing was drafted: plain decoding was expected to be as fast"
    rate = own.num_accepted_tokens / own.num_draft_tokens
    return (
        f"{own.num_accepted_tokens} of {own.num_draft_tokens} drafted tokens accepted ({rate:.0%}) in "
        f"{own.num_drafts} rounds"
    )

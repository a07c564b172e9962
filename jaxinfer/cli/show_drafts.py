"""Streamed text with accepted drafts in colour on terminals, and in brackets elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from jaxinfer.outputs import RequestOutput
from jaxinfer.tokenizer import Tokenizer

_ACCEPTED, _PLAIN = "\x1b[32m", "\x1b[0m"


def print_drafts(deltas: Iterable[RequestOutput], tokenizer: Tokenizer, out: TextIO | None = None) -> RequestOutput:
    """Print a stream with its accepted drafts marked; returns the last output.

    A round lands its accepted drafts and one more token: all tokens of an output but the last were drafted.
    """
    to: TextIO = sys.stdout if out is None else out
    in_colour = to.isatty() and "NO_COLOR" not in os.environ
    begin, end = (_ACCEPTED, _PLAIN) if in_colour else ("[", "]")
    text = None
    for output in deltas:
        if text is None:
            text = tokenizer.stream(output.prompt_token_ids, skip_special_tokens=True)
        *drafted, last = ["", *(text.append(token) for token in output.outputs[0].token_ids)]
        accepted = "".join(drafted)
        to.write(f"{begin}{accepted}{end}{last}" if accepted else last)
        if output.finished:
            to.write(text.finish())
        to.flush()
    to.write("\n")
    return output


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

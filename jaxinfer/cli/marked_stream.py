"""Streamed text with marks around some of its tokens: colours on terminals, brackets elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import NamedTuple, TextIO

from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.token_marks import DRAFT, FORCED, REDRAWN
from jaxinfer.tokenizer import Tokenizer

_PLAIN = "\x1b[0m"


class Mark(NamedTuple):
    """How tokens are marked on a terminal, and elsewhere."""

    colour: str  # escape sequence
    begin: str
    end: str


MARKS = {DRAFT: Mark("\x1b[32m", "[", "]"), REDRAWN: Mark("\x1b[33m", "{", "}"), FORCED: Mark("\x1b[36m", "[", "]")}


def print_marked(
    outputs: Iterable[RequestOutput],
    tokenizer: Tokenizer,
    sources: Collection[str],
    out: TextIO | None = None,
) -> RequestOutput:
    """Print the stream of one request that returns token sources, one pair of marks around neighbouring tokens of one
    source; returns the last output.

    Args:
        sources: which tokens are marked.
    """
    to: TextIO = sys.stdout if out is None else out
    in_colour = to.isatty() and "NO_COLOR" not in os.environ
    text = None
    for output in outputs:
        if text is None:
            text = tokenizer.stream(output.prompt_token_ids, skip_special_tokens=True)
        part = output.outputs[0]
        pieces = zip(part.token_sources or (), map(text.append, part.token_ids), strict=True)
        for source, group in groupby(pieces, key=lambda piece: piece[0]):
            joined = "".join(piece for _, piece in group)
            if source in sources and joined:
                mark = MARKS[source]
                joined = f"{mark.colour}{joined}{_PLAIN}" if in_colour else f"{mark.begin}{joined}{mark.end}"
            to.write(joined)
        if output.finished:
            to.write(text.finish())
        to.flush()
    to.write("\n")
    return output

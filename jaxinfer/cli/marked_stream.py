"""Streamed text with marks around some of its tokens: colours on terminals, brackets elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TextIO

from jaxinfer.outputs import RequestOutput
from jaxinfer.tokenizer import Tokenizer

_PLAIN = "\x1b[0m"


class Mark(NamedTuple):
    """How tokens are marked on a terminal, and elsewhere."""

    colour: str  # escape sequence
    begin: str
    end: str


ACCEPTED = Mark("\x1b[32m", "[", "]")
REDRAWN = Mark("\x1b[33m", "{", "}")
FORCED = Mark("\x1b[36m", "[", "]")


def print_marked(
    outputs: Iterable[RequestOutput],
    tokenizer: Tokenizer,
    marks_of: Callable[[int, Sequence[int]], Sequence[Mark | None]],
    out: TextIO | None = None,
) -> RequestOutput:
    """Print the stream of one request, one pair of marks around neighbouring tokens of one kind; returns the last
    output.

    Args:
        marks_of: (number of tokens before, new tokens) -> the mark of each new token; None: no mark.
    """
    to: TextIO = sys.stdout if out is None else out
    in_colour = to.isatty() and "NO_COLOR" not in os.environ
    text, count = None, 0
    for output in outputs:
        if text is None:
            text = tokenizer.stream(output.prompt_token_ids, skip_special_tokens=True)
        tokens = output.outputs[0].token_ids
        pieces = zip(marks_of(count, tokens), map(text.append, tokens), strict=True)
        for mark, group in groupby(pieces, key=lambda piece: piece[0]):
            joined = "".join(piece for _, piece in group)
            if mark is not None and joined:
                joined = f"{mark.colour}{joined}{_PLAIN}" if in_colour else f"{mark.begin}{joined}{mark.end}"
            to.write(joined)
        count += len(tokens)
        if output.finished:
            to.write(text.finish())
        to.flush()
    to.write("\n")
    return output

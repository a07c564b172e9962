"""What rows of a launch do, and what a launch of several rounds may land."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RowKind(enum.Enum):
    """What a row of a launch does."""

    PROMPT_CHUNK = "prompt chunk"  # computes tokens that the host knows; the last chunk samples one
    DECODE = "decode"  # computes the latest token, which is in its seat, and samples the next one
    VERIFICATION = "verification"  # drafts tokens and keeps those that decoding would have sampled
    BLOCK = "block"  # denoises a block of tokens


@dataclass(frozen=True)
class Rounds:
    """A launch of rows that are all in their seats: how many rounds it may run, and what each round lands for a row.

    A sequence that ends lands no more, whatever `least_tokens` says.
    """

    kind: RowKind = RowKind.DECODE
    most: int = 1  # rounds in one launch
    most_tokens: int = 1
    least_tokens: int = 1

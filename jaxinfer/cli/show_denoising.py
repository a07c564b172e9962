"""Blocks of a diffusion model as they are denoised, a line for each round, in colour on terminals."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.tokenizer import Tokenizer

_NEW, _PLAIN = "\x1b[32m", "\x1b[0m"
MASK_SIGN = "░░"
_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": ""}


@dataclass(frozen=True)
class BlockRound:
    """A block after one round."""

    number: int  # within its block, from 1 on
    start: int  # position of the block's first token
    tokens: tuple[int, ...]
    is_new: tuple[bool, ...]  # the tokens that this round committed or changed


class BlockHistory:
    """The blocks of one request, followed through launches."""

    def __init__(self) -> None:
        self._latest: BlockRound | None = None

    def rounds(self, landed: LandedRounds[DenoiseOutput], index: int = 0) -> Iterator[BlockRound]:
        """Yield the rounds of a launch for the request with this index in it."""
        row, num_given = int(landed.rows[index]), landed.requests[index].num_prompt_tokens
        ran, starts, blocks = (
            np.asarray(x)[:, row] for x in (landed.output.ran, landed.output.start, landed.output.blocks)
        )
        for number in np.flatnonzero(ran).tolist():
            start, tokens = int(starts[number]), tuple(token for token in blocks[number].tolist() if token >= 0)
            before = self._latest if self._latest is not None and self._latest.start == start else None
            if before is None:
                is_new = tuple(place >= num_given for place in range(start, start + len(tokens)))
            else:
                is_new = tuple(old != new for old, new in zip(before.tokens, tokens, strict=True))
            self._latest = BlockRound(1 if before is None else before.number + 1, start, tokens, is_new)
            yield self._latest


class DenoisingPicture:
    """Listener that writes a line for each round of one request: masks as `░░`, new tokens in colour or brackets.

    Args:
        tokenizer: of the model.
        mask_token_id: the token of a place that is not denoised yet.
        out: where to write; None: the standard output.
    """

    def __init__(self, tokenizer: Tokenizer, mask_token_id: int, out: TextIO | None = None) -> None:
        self._tokenizer, self._mask = tokenizer, mask_token_id
        self._out: TextIO = sys.stdout if out is None else out
        in_colour = self._out.isatty() and "NO_COLOR" not in os.environ
        self._begin, self._end = (_NEW, _PLAIN) if in_colour else ("[", "]")
        self._history = BlockHistory()
        self.num_forwards = 0

    def __call__(self, landed: LandedRounds[DenoiseOutput]) -> None:
        if not landed.requests:
            return
        for found in self._history.rounds(landed):
            self.num_forwards += 1
            if found.number == 1:
                self._out.write(f"block at {found.start}\n")
            self._out.write(f"{found.number:4}  {self._line(found)}\n")
        self._out.flush()

    def _line(self, found: BlockRound) -> str:
        parts, open_ = [], False
        for token, is_new in zip(found.tokens, found.is_new, strict=True):
            shows = is_new and token != self._mask
            if shows != open_:
                parts.append(self._begin if shows else self._end)
                open_ = shows
            parts.append(MASK_SIGN if token == self._mask else self._text(token))
        return "".join([*parts, self._end if open_ else ""])

    def _text(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return "".join(_SIGNS.get(letter, letter) for letter in text)

"""Printed view of rounds: accepted drafts are green, rejected ones red, the target's own token blue."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from jaxinfer.textbook.speculative.chain_drafters import Proposal
from jaxinfer.textbook.speculative.classic_rule import Verdict

_COLOURS = {"green": "32", "red": "31", "blue": "34", "title": "97;100"}
_WIDTH = 38


@dataclass(frozen=True)
class Round:
    """A round, as the view shows it: g drafts, their verification, and the text with what landed."""

    position: int  # of the first draft in its sequence
    proposal: Proposal
    verdict: Verdict
    draws: Sequence[float | None]  # the uniform number of each ratio; empty for greedy decoding, which draws nothing
    p: np.ndarray  # float64 [g + 1, V], see `LogitsProcessor.beliefs`
    num_landed: int  # tokens that landed; the target adds none after an accepted end token
    generated: Sequence[int]  # tokens of the continuation so far


class StepView:
    """Printer of a generation's steps: in colour on a terminal, else in plain ASCII (also if NO_COLOR is set).

    Args:
        tokenizer: its `decode(token_ids, skip_special_tokens=...)` gives the texts; None: print token ids alone.
        out: where to print; None: standard output.
    """

    def __init__(self, tokenizer: Any = None, out: TextIO | None = None) -> None:
        self._tokenizer = tokenizer
        self._out = sys.stdout if out is None else out
        self.in_colour = self._out.isatty() and not os.environ.get("NO_COLOR")

    def initial_step(self, token: int) -> None:
        """Print the target's token that precedes the first round."""
        self._title("First Token")
        self._line(f"  {self._paint('blue', self._name(token))}")

    def speculative_step(self, of: Round) -> None:
        """Print a round: its drafts with their chances of acceptance, the target's token, and the text so far."""
        count, good, bad = of.verdict.num_accepted, *(("\u2713", "\u2717") if self.in_colour else ("+", "x"))
        drafts = of.proposal.tokens
        self._title("Speculative Step")
        self._line(f"Position: {of.position}, Gamma: {len(drafts)}, Accepted: {count}")
        if of.proposal.entropy is not None:
            e = of.proposal.entropy
            self._line(f"Entropy: {e.normalised:.3f} of ln V, smoothed {e.smoothed:.3f}, gamma {e.gamma}")
        if drafts:
            self._line("Drafts:")
        for index, token in enumerate(drafts):
            name, q = self._name(token), of.proposal.beliefs[index]
            what = f"  [{of.position + index}]: {name} (q={q:.2f}, p={of.p[index, token]:.2f})"
            if index < count:
                self._line(self._paint("green", f"{what} {good}{self._comparison(of, index, '<')}"))
            elif index == count:
                self._line(self._paint("red", f"{what} {bad} rejected{self._comparison(of, index, '>=')}"))
            else:
                self._line(self._paint("red", f"  [{of.position + index}]: {name} (q={q:.2f}) {bad} after a rejection"))
        if of.num_landed > count:
            kind = "in place of the rejected draft"
            if count == len(drafts):
                kind = "bonus token" if drafts else "no drafts"
            token = of.verdict.token
            name = self._paint("blue", self._name(token))
            self._line(f"Target:\n  [{of.position + count}]: {name} (p={of.p[count, token]:.2f}, {kind})")
        self._line(f"Generated: {self._text(of.generated)}")

    def _comparison(self, of: Round, index: int, sign: str) -> str:
        """Return `: r=0.75 >= p/q=0.62`, or nothing where no number was drawn."""
        if index >= len(of.draws) or of.draws[index] is None:
            return ""
        return f": r={of.draws[index]:.2f} {sign} p/q={of.verdict.ratios[index]:.2f}"

    def beam_search_step(self, position: int, beams: Sequence[tuple[float, Sequence[int]]]) -> None:
        """Print the remaining beams, best first, with their scores and generated tokens."""
        self._title("Beam Search Step")
        self._line(f"Position: {position}")
        for number, (score, tokens) in enumerate(beams, start=1):
            *before, last = map(self._name, tokens)
            self._line(f"  {number}. {score:.3f} {' '.join([*before, self._paint('blue', last)])}")

    def end_token_found(self, position: int) -> None:
        """Print that the generation ended with an end token."""
        self._line(self._paint("red", f"End token at position {position}"))

    def _title(self, text: str) -> None:
        title = f" {text} ".center(_WIDTH, "=")
        self._line(self._paint("title", title))

    def _name(self, token: int) -> str:
        """Return a token's id and text, as in `12 " and"`, or the id alone."""
        return str(token) if self._tokenizer is None else f"{token} {self._text([token])}"

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens in quotation marks, or their ids."""
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return f'"{text if self.in_colour and text.isprintable() else ascii(text)[1:-1]}"'

    def _paint(self, colour: str, text: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.in_colour else text

    def _line(self, text: str) -> None:
        print(text, file=self._out)

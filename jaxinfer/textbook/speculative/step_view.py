"""Printed view of rounds: accepted drafts are green, rejected ones red, the target's own token blue."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from jaxinfer.textbook.speculative.chain_drafters import Proposal
from jaxinfer.textbook.speculative.classic_rule import Verdict

_COLOURS = {"green": "32", "red": "31", "blue": "34", "title": "97;100"}
_WIDTH = 38


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

    def speculative_step(
        self, position: int, proposal: Proposal, verdict: Verdict, p: np.ndarray, num_landed: int
    ) -> None:
        """Print a round: its drafts with their chances of acceptance, then the token that the target adds.

        Args:
            position: of the first draft in its sequence.
            proposal: g drafts.
            verdict: result of their verification.
            p: [g + 1, V], the target's distributions.
            num_landed: tokens that landed; the target adds none after an accepted end token.
        """
        count, good, bad = verdict.num_accepted, *(("\u2713", "\u2717") if self.in_colour else ("+", "x"))
        self._title("Speculative Step")
        self._line(f"Position: {position}, Gamma: {len(proposal.tokens)}, Accepted: {count}")
        if proposal.entropy is not None:
            e = proposal.entropy
            self._line(f"Entropy: {e.normalised:.3f} of ln V, smoothed {e.smoothed:.3f}, gamma {e.gamma}")
        if proposal.tokens:
            self._line("Drafts:")
        for index, token in enumerate(proposal.tokens):
            what = f"  [{position + index}]: {self._name(token)} (q={proposal.q[index, token]:.2f}"
            if index < count:
                self._line(self._paint("green", f"{what}, p/q={verdict.ratios[index]:.2f}) {good}"))
            elif index == count:
                self._line(self._paint("red", f"{what}, p/q={verdict.ratios[index]:.2f}) {bad} rejected"))
            else:
                self._line(self._paint("red", f"{what}) {bad} after a rejection"))
        if num_landed == count:
            return
        kind = "in place of the rejected draft"
        if count == len(proposal.tokens):
            kind = "bonus token" if proposal.tokens else "no drafts"
        name = self._paint("blue", self._name(verdict.token))
        self._line(f"Target:\n  [{position + count}]: {name} (p={p[count, verdict.token]:.2f}, {kind})")

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
        if self._tokenizer is None:
            return str(token)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return f'{token} "{text if self.in_colour and text.isprintable() else ascii(text)[1:-1]}"'

    def _paint(self, colour: str, text: str) -> str:
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.in_colour else text

    def _line(self, text: str) -> None:
        print(text, file=self._out)

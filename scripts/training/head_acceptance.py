"""Acceptance of an EAGLE-3 head's drafts: greedy chains along text that its target wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.models.eagle3 import Eagle3Head
from training.unrolled import HeadRows, drafts_right

DRAFTED = 7
"""Tokens of a chain."""


@dataclass(frozen=True)
class Chains:
    """Rounds of drafting, one after the other along texts.

    Attributes:
        tokens: of the texts, but for the first of each, which is not drafted.
        rounds: verifications by the target.
        reached: for each depth, the rounds whose drafts before it were all right, and whose text is that long.
        right: of these, the rounds whose draft there was right too.
    """

    tokens: int
    rounds: int
    reached: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """Mean tokens that a round adds to a text: right drafts and the target's own."""
        return self.tokens / max(self.rounds, 1)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of right drafts among those that were reached, for each depth."""
        return tuple(good / max(tried, 1) for tried, good in zip(self.reached, self.right, strict=True))

    @classmethod
    def along(cls, texts: Iterable[np.ndarray], depth: int) -> Chains:
        """Count the chains of texts. Each text is bool [drafts, depth]: whether a chain that begins at each token is
        right there; at the end of the text, the depths beyond it are False."""
        tokens = rounds = 0
        reached, right = np.zeros((2, depth), int)
        for text in texts:
            tokens += len(text)
            at = 0
            while at < len(text):
                left = min(depth, len(text) - at)
                kept = int(np.argmin(text[at, :left])) if not text[at, :left].all() else left
                rounds += 1
                reached[: min(kept + 1, left)] += 1
                right[:kept] += 1
                at += kept + 1
        return cls(tokens, rounds, tuple(reached.tolist()), tuple(right.tolist()))


def make_right(table: jax.Array) -> Callable[[Eagle3Head, Sequence[HeadRows]], list[np.ndarray]]:
    """A function that gives, of texts that each are one row, what `Chains.along` takes. `table` [vocab, hidden] has
    the embeddings; the starts of a row are all tokens that are drafted of it, in their order."""

    @jax.jit
    def right(head: Eagle3Head, rows: dict[str, jax.Array]) -> jax.Array:
        return drafts_right(head, table, rows, DRAFTED)

    def measure(head: Eagle3Head, batches: Sequence[HeadRows]) -> list[np.ndarray]:
        found = []
        for rows in batches:
            for each, starts in zip(np.asarray(right(head, rows.arrays())), rows.starts, strict=True):
                found.append(each[starts < rows.ids.shape[1] - 1])
        return found

    return measure

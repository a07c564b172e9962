"""Log probabilities of given tokens, which a request is asked for instead of drawing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Scoring:
    """Tokens of a request whose log probabilities are wanted: the end of its prompt, and one token after it.

    Attributes:
        num_tokens: how many.
        last: the token after the prompt, which is the last of them.
        temperature: that the model's logits are divided by.
        logprobs: of the first of them, as they become known.
    """

    num_tokens: int
    last: int
    temperature: float = 1.0
    logprobs: list[float] = field(default_factory=list)

    def take(self, first: int, logprobs: Sequence[float]) -> None:
        """Take log probabilities of the tokens from number `first` on, which may be before them: of those that were
        computed again, the first ones stay."""
        known = len(self.logprobs)
        if first <= known:
            self.logprobs += logprobs[known - first :]


def given_length(num_prompt_tokens: int, scoring: Scoring | None) -> int:
    """Return how many tokens of a request's prompt are given: all, or those before the scored ones, which are computed
    as if they had been drawn."""
    return num_prompt_tokens if scoring is None else num_prompt_tokens + 1 - scoring.num_tokens

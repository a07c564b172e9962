"""Choice of the beams that continue: the bookkeeping of beam search, as transformers does it, without a model."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.constraints.structured_outputs import StructuredOutputsParams
from jaxinfer.limits import MAX_LOGPROBS


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search. Bad values raise ValueError naming field and value.

    Args:
        beam_width: continuations that are followed, and that are returned.
        max_tokens: most tokens of each.
        length_penalty: the score of a continuation is its log probability divided by its number of tokens to this
            power: 0 compares log probabilities, greater numbers favour long continuations.
        early_stopping: stop as soon as `beam_width` continuations have ended; else when no beam can become better than
            the worst of them at its present length.
        ignore_eos: continue after end-of-sequence tokens.
        structured_outputs: the grammar that continuations follow: the candidates are the most likely tokens that it
            allows, with their log probabilities among all. A dict has the arguments of `StructuredOutputsParams`.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if 2 * self.beam_width > MAX_LOGPROBS:
            raise ValueError(f"beam_width must be at most {MAX_LOGPROBS // 2}, got {self.beam_width}")
        penalty = self.length_penalty
        if not isinstance(penalty, numbers.Real) or isinstance(penalty, bool) or not math.isfinite(penalty):
            raise ValueError(f"length_penalty must be a finite number, got {penalty!r}")
        for name in ("early_stopping", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
            if self.ignore_eos:
                raise ValueError("ignore_eos=True and structured_outputs exclude each other: a grammar ends its texts")


@dataclass(frozen=True)
class Hypothesis:
    """Finished continuation."""

    tokens: tuple[int, ...]  # the end-of-sequence token included
    logprob: float  # of all of them together, in nats
    score: float
    ended: bool  # by an end-of-sequence token; else by its length


@dataclass(frozen=True)
class Extension:
    """A beam of the next step: a beam of this one and a token."""

    parent: int
    token: int
    logprob: float  # of all tokens


@dataclass
class BeamSearch:
    """The beams of one prompt, step by step.

    Args:
        params: parameters of the search.
        eos_token_ids: tokens that end a continuation.

    Raises:
        ValueError: with so many end-of-sequence tokens, more than MAX_LOGPROBS candidates are needed.
    """

    params: BeamSearchParams
    eos_token_ids: frozenset[int] = frozenset()
    beams: list[tuple[tuple[int, ...], float]] = field(default_factory=lambda: [((), 0.0)])  # tokens, log probability
    hypotheses: list[Hypothesis] = field(default_factory=list)  # the best so far, best first
    is_done: bool = False

    def __post_init__(self) -> None:
        if self.params.ignore_eos:
            self.eos_token_ids = frozenset()
        if self.num_candidates > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width={self.params.beam_width} with {len(self.eos_token_ids)} end-of-sequence tokens looks at "
                f"{self.num_candidates} tokens after each beam, at most {MAX_LOGPROBS} can be had"
            )

    @property
    def num_candidates(self) -> int:
        """Number of the most likely tokens needed after each beam: enough, however many of them end it."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    def step(self, candidates: Sequence[Iterable[tuple[int, float]]]) -> list[Extension]:
        """Return the beams of the next step, best first; none if the search is over.

        Args:
            candidates: for each beam its `num_candidates` most likely tokens with their log probabilities.
        """
        width, length = self.params.beam_width, len(self.beams[0][0]) + 1
        found = [
            Extension(parent, token, logprob + more)
            for parent, (tokens_after, (_, logprob)) in enumerate(zip(candidates, self.beams, strict=True))
            for token, more in tokens_after
        ]
        found.sort(key=lambda one: (-one.logprob, one.parent, one.token))
        going_on: list[Extension] = []
        for rank, one in enumerate(found[: self.num_candidates]):
            if one.token in self.eos_token_ids:
                if rank < width:  # as good as a beam that continues
                    self._add((*self.beams[one.parent][0], one.token), one.logprob, ended=True)
            elif len(going_on) < width:
                going_on.append(one)
        self.beams = [((*self.beams[one.parent][0], one.token), one.logprob) for one in going_on]
        # After its last token a beam is not extended.
        self.is_done = length == self.params.max_tokens or not going_on or self._is_settled(found[0].logprob, length)
        if self.is_done and not (len(self.hypotheses) >= width and self._is_settled(found[0].logprob, length)):
            for tokens, logprob in self.beams:
                self._add(tokens, logprob, ended=False)
        return [] if self.is_done else going_on

    def _is_settled(self, best: float, length: int) -> bool:
        """Return whether enough continuations have ended that the search need not wait for any beam, the best of which
        has the log probability `best`."""
        if len(self.hypotheses) < self.params.beam_width:
            return False
        return self.params.early_stopping or self.hypotheses[-1].score >= self._score(best, length)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.params.length_penalty

    def _add(self, tokens: tuple[int, ...], logprob: float, *, ended: bool) -> None:
        self.hypotheses.append(Hypothesis(tokens, logprob, self._score(logprob, len(tokens)), ended))
        self.hypotheses.sort(key=lambda one: -one.score)
        del self.hypotheses[self.params.beam_width :]

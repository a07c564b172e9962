"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token by the model's own distribution, its rank (1: most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt; in a stream, what is new since the last output."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of all tokens so far
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string that matched; None for end of sequence

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request in seconds of `time.perf_counter`, and what it had to compute."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0  # rounds in which tokens were drafted
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of these

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """One prompt with its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of a stream, in its first output
    metrics: RequestMetrics | None = field(default=None, repr=False)
    num_cached_tokens: int = 0
    error: str | None = None  # why, when a completion's finish_reason is "error"


@dataclass
class BeamSearchSequence:
    """A continuation that beam search found."""

    token_ids: list[int]  # an end-of-sequence token included
    text: str
    cumulative_logprob: float
    score: float  # `cumulative_logprob` by the length penalty
    finish_reason: str  # "stop" or "length"


@dataclass
class BeamSearchOutput:
    """One prompt with its continuations, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]

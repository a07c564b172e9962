"""Outputs of requests and of beam searches, as users get them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class EngineFailure(str):
    """Why a request has ended with an error, where the reason is the engine's and not the request's."""

    __slots__ = ()


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token, see `logprobs_mode` of `LLM`, its rank (1: most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class DenoisedBlock:
    """A block of a diffusion model's output after a round of denoising."""

    first: int  # number of the output token in its first place
    token_ids: list[int | None]  # None: the place is masked


@dataclass
class CompletionOutput:
    """One completion of a prompt; in a stream, only what is new since the previous output."""

    index: int  # of the sample or branch
    text: str  # empty with `detokenize=False`
    token_ids: list[int]  # tokens of the output
    cumulative_logprob: float | None = None  # sum of log probabilities of all tokens so far
    logprobs: list[dict[int, Logprob]] | None = None  # for each token, the sampled one first
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string that matched; None for end of sequence
    token_sources: list[str] | None = None  # for each token: "drawn", "draft" (accepted), "redrawn" or "forced"
    blocks: list[DenoisedBlock] | None = None  # of a diffusion model, after each round
    weights_versions: list[tuple[Any, int]] | None = None  # (version of the weights, number of tokens), in their order

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request in seconds of `time.perf_counter`, and its counters."""

    arrival_time: float  # when it was queued
    first_scheduled_time: float | None = None  # when it first took part in a launch
    first_token_time: float | None = None  # when its first token landed
    last_token_time: float | None = None  # when its latest token landed
    finished_time: float | None = None  # when it ended
    num_preemptions: int = 0  # how often its pages were taken
    num_drafts: int = 0  # rounds in which tokens were drafted
    num_draft_tokens: int = 0  # drafted tokens
    num_accepted_tokens: int = 0  # drafted tokens that were accepted

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """One prompt with its completions; in a stream, with those that have something new."""

    request_id: str  # ids of one call grow in the order of the prompts
    prompt: str | None  # the prompt's text, if it was given as text
    prompt_token_ids: list[int]  # the prompt's tokens
    outputs: list[CompletionOutput]  # one for each sample or branch
    finished: bool  # whether this is the last output
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # in a stream, in the first output only
    metrics: RequestMetrics | None = field(default=None, repr=False)  # its times and counters
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    error: str | None = None  # the reason, when a completion's finish_reason is "error"


@dataclass
class BeamSearchSequence:
    """A continuation that beam search found."""

    token_ids: list[int]  # an end-of-sequence token included
    text: str
    cumulative_logprob: float
    score: float  # `cumulative_logprob` divided by length ** length_penalty
    finish_reason: str  # "stop" or "length"


@dataclass
class BeamSearchOutput:
    """One prompt with its continuations, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]

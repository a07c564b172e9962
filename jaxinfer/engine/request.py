"""One request on the host: known tokens, computed tokens, pages, and how it ended."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from jaxinfer.outputs import RequestMetrics
from jaxinfer.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands; its value is the finish reason once it is finished."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED


_FINISHED = frozenset(
    (
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
    )
)


@dataclass(eq=False)
class Request:
    """A prompt on its way to a completion. The scheduler lets `num_computed_tokens` catch up with `num_tokens`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_total_tokens: int  # prompt and output, from max_tokens and max_model_len
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    request_key: tuple[int, int] = (0, 0)  # two 32-bit words of randomness
    priority: int = 0
    arrival: int = 0  # order of arrival, unique in its engine

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    seat: int = -1  # row of the engine's host arrays while running
    stop_reason: int | str | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        params = self.sampling_params
        stop_ids = frozenset(params.stop_token_ids or ())
        self.ending_token_ids = stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status in _FINISHED

    def append(self, token: int) -> RequestStatus | None:
        """Add a sampled token; the finished status that it brings about by the rules on tokens and length, if any."""
        self.token_ids.append(token)
        if token in self.ending_token_ids and self.num_output_tokens > self.sampling_params.min_tokens:
            if token not in self.eos_token_ids or self.sampling_params.ignore_eos:
                self.stop_reason = token
            return RequestStatus.FINISHED_STOPPED
        if len(self.token_ids) >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def banned_tokens(self) -> frozenset[int]:
        """Tokens that must not be sampled next: those that would end it before `min_tokens`."""
        if self.num_output_tokens < self.sampling_params.min_tokens:
            return self.ending_token_ids
        return frozenset()

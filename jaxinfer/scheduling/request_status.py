"""The state of a request, and the committed result of its landings."""

from __future__ import annotations

import enum
from typing import NamedTuple


class RequestStatus(enum.Enum):
    """The state of a request; its value is the finish reason once the request is finished."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, reason: str) -> None:
        # An attribute, because it is read several times for every token.
        self.is_finished = reason in ("stop", "length", "abort", "error")


class Landed(NamedTuple):
    """The committed result of a request. It is assigned whole, so an interruption leaves the old or the new record."""

    num_tokens: int  # of prompt and output; `token_ids` is longer while a landing is prepared, or log
    # probabilities are awaited
    num_logprobs: int = 0
    status: RequestStatus | None = None  # a finished status, or None
    stop_reason: int | str | None = None
    error: str | None = None

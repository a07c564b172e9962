"""What takes several requests to answer, as a state machine: it asks for requests and is given outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup

type Item = Request | RequestGroup


@dataclass(frozen=True)
class Answer[T]:
    """The end of a job."""

    value: T


class Job[T](Protocol):
    """Skeleton-of-Thought, a beam search: it never runs the engine, so many of them run beside other requests.

    Attributes:
        name: for messages.
        stream: whether its requests' outputs are wanted as they land, or whole at their end.
    """

    @property
    def name(self) -> str: ...
    @property
    def stream(self) -> bool: ...

    def begin(self) -> Sequence[Item] | Answer[T]:
        """The first requests.

        Raises:
            ValueError: it cannot be served.
        """
        ...

    def take(self, outputs: Sequence[RequestOutput]) -> Sequence[Item] | Answer[T]:
        """Hear what has come of its requests since the last call, after every step; further requests, or the answer.

        Raises:
            RuntimeError: a request has failed.
        """
        ...

    def abort(self) -> None:
        """Give up what it has started itself; requests that it asked for are aborted by its caller."""
        ...

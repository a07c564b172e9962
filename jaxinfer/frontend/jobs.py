"""Jobs: state machines for answers that take several requests. A job asks for requests and is given their outputs."""

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
    """The result of a finished job."""

    value: T


class Job[T](Protocol):
    """A task of several requests, such as Skeleton-of-Thought or a beam search.

    It never runs the engine, so that many jobs can run beside other requests.

    Attributes:
        name: for messages.
        stream: whether it wants outputs as they land; otherwise each is whole and comes at the end.
    """

    @property
    def name(self) -> str: ...
    @property
    def stream(self) -> bool: ...

    def begin(self) -> Sequence[Item] | Answer[T]:
        """Return the first requests.

        Raises:
            ValueError: the job cannot be served.
        """
        ...

    def take(self, outputs: Sequence[RequestOutput]) -> Sequence[Item] | Answer[T]:
        """Take new outputs of its requests, after every step; returns further requests or the answer.

        Raises:
            RuntimeError: a request has failed.
        """
        ...

    def abort(self) -> None:
        """Abort what the job has started itself; the caller aborts the requests that it asked for."""
        ...

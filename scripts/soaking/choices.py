"""Answers of all endpoints in one form, as far as they have come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


class BrokenAnswerError(Exception):
    """What came is no answer of its endpoint, or ended with an error event.

    Attributes:
        code: of the error event; None: there was none.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Call:
    """One call of a tool.

    Attributes:
        arguments: JSON.
        is_read: whether they came as an object, so that only their values are known.
    """

    name: str
    arguments: str = ""
    is_read: bool = False


@dataclass
class Choice:
    """One choice of an answer as far as it has come.

    Attributes:
        finish_reason: in the words of its endpoint.
    """

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


type Answer = dict[str, Choice]


class Reader(Protocol):
    """What reads one answer, whole or by events.

    Attributes:
        answer: as far as it has come.
        is_over: whether the last event has come.
        is_in_call: whether the latest event was one of a tool call.
        is_streamed: whether it has come by events.
    """

    answer: Answer
    is_streamed: bool
    is_over: bool
    is_in_call: bool

    def read_whole(self, body: dict[str, Any]) -> None:
        """Read a whole answer."""
        ...

    def add(self, event: str) -> None:
        """Read an event.

        Raises:
            BrokenAnswerError: it is an error, or is not what may come now.
        """
        ...


# Errors of Anthropic's form, and of responses, have no codes.
_CODES = {"the request was aborted": "aborted", "the queue is full": "queue_full"}


def code_of(error: dict[str, Any]) -> str | None:
    """The code of an error; where its form has none, by its message."""
    if (code := error.get("code")) not in (None, "server_error"):
        return code
    message = str(error.get("message"))
    return next((code for words, code in _CODES.items() if message.startswith(words)), None)

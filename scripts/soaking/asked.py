"""Requests whose answers are known: what is sent over HTTP, and how an engine without HTTP answers the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request, in the words of HTTP and of an engine.

    Attributes:
        path: of the endpoint.
        body: what is sent, but for `stream`.
        offline: what `soaking.offline` answers: a `call`, and what it takes.
        may_stream: whether the endpoint streams such an answer.
        then: body of the request that continues the answer; None: there is none.
    """

    path: str
    body: dict[str, Any]
    offline: dict[str, Any]
    may_stream: bool = True
    then: dict[str, Any] | None = None


@dataclass(frozen=True)
class Request:
    """One of the distinct requests."""

    number: int
    kind: str
    asked: Asked


@dataclass(frozen=True)
class Kind:
    """A kind of requests.

    Attributes:
        weight: how often it is sent, relative to the others.
        make: makes a random one.
        has_manner: whether it is sent in one manner only, which asks for it.
    """

    name: str
    weight: int
    make: Callable[[random.Random], Asked]
    has_manner: bool = False

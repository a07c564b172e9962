"""Lines of a file of requests, in OpenAI's batch format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One line of a file.

    Attributes:
        number: of the line, from 1.
        custom_id: None: it has none that can be read.
        error: why it cannot be asked; None: `url` and `body` are there.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    error: str | None = None


def lines_of(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Yield the lines of a file, blank ones left out. A line that cannot be asked has an error."""
    first_of: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            line = _parsed(raw, number)
            if line.custom_id is not None and (first := first_of.setdefault(line.custom_id, number)) != number:
                line = Line(number, line.custom_id, error=f"custom_id is that of line {first}")
            yield line


def count_lines(path: str | os.PathLike[str]) -> int:
    """Return the number of lines that are not blank."""
    with open(path, "rb") as file:
        return sum(1 for raw in file if raw.strip())


def _parsed(raw: bytes, number: int) -> Line:
    try:
        found: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return Line(number, None, error=f"not JSON: {error}")
    if not isinstance(found, dict):
        return Line(number, None, error=f"must be an object, got {type(found).__name__}")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str):
        return Line(number, None, error=f"custom_id must be a string, got {custom_id!r}")
    url, body, verb = found.get("url"), found.get("body"), found.get("method", "POST")
    unknown = [name for name in found if name not in _FIELDS]
    error = None
    if unknown:
        error = f"unknown fields {', '.join(unknown)}; known are {', '.join(_FIELDS)}"
    elif verb != "POST":
        error = f"method must be POST, got {verb!r}"
    elif url not in URLS:
        error = f"url must be one of {', '.join(URLS)}, got {url!r}"
    elif not isinstance(body, dict):
        error = f"body must be an object, got {type(body).__name__}"
    elif body.get("stream"):
        error = "stream: a line of a file has one answer"
    elif url == "/v1/responses" and (body.get("background") or body.get("previous_response_id")):
        error = "background and previous_response_id need a server, which remembers responses"
    if error is not None:
        return Line(number, custom_id, error=error)
    return Line(number, custom_id, str(url), body)

"""What of a request and its answer would depend on the run is set by the line alone.

A run that was killed and continued gives the same file as one that was not.
"""

from __future__ import annotations

import hashlib
from typing import Any

from jaxinfer.batch.lines import Line

_IDS = frozenset({"id", "call_id", "item_id", "tool_call_id"})
_TIMES = frozenset({"created", "created_at", "completed_at"})
# What the cache held is of the run.
_OF_THE_RUN = frozenset({"cached_tokens"})


def with_seed(line: Line) -> dict[str, Any]:
    """Return the body of a line, with a seed that follows from its custom id if it has none."""
    assert line.body is not None
    if line.body.get("seed") is not None:
        return line.body
    return {**line.body, "seed": int.from_bytes(_digest(str(line.custom_id))[:6])}


def stable(answer: Any, line: Line, time: int) -> Any:
    """Return an answer with ids and times that follow from its line.

    Args:
        time: in seconds since 1970, for all times.
    """
    known: dict[str, str] = {}

    def id_of(given: str) -> str:
        if given not in known:
            head, mark, _ = given.partition("_" if "_" in given else "-")
            digest = _digest(f"{line.custom_id} {len(known)}").hex()[:24]
            known[given] = f"{head}{mark}{digest}" if mark else digest
        return known[given]

    def walked(value: Any) -> Any:
        if isinstance(value, list):
            return [walked(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {name: of_field(name, each) for name, each in value.items() if name not in _OF_THE_RUN}

    def of_field(name: str, value: Any) -> Any:
        if name in _IDS and isinstance(value, str):
            return id_of(value)
        if name in _TIMES and isinstance(value, int | float):
            return time
        return walked(value)

    return walked(answer)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()

"""The error of all code that reads or writes checkpoints."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, of an unsupported kind, or does not fit its configuration."""


def some_of(names: Iterable[str], limit: int = 8) -> str:
    """Join the first names of a possibly long list for an error message."""
    listed = list(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")

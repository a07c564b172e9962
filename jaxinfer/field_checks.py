"""Checks of settings on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def fields_of(cls: type, name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict whose keys are fields of a dataclass.

    Args:
        name: the setting's name, for messages.

    Raises:
        ValueError: `value` is not a dict, or a key is not a field.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a {cls.__name__} or a dict, got {value!r}")
    names = [field.name for field in fields(cls)]
    for key in value:
        if key not in names:
            raise ValueError(f"{name} has no field {key!r}; it has {', '.join(names)}")
    return dict(value)


def check_positive_integer(name: str, value: Any) -> None:
    """Raise ValueError, naming the setting and its value, unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")

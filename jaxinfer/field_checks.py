"""Checks of settings, where they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def fields_of(cls: type, name: str, value: Any) -> dict[str, Any]:
    """The fields of a dataclass that a dict gives.

    Args:
        name: of what the dict was given as, for messages.

    Raises:
        ValueError: it is no dict, or a key is no field.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a {cls.__name__} or a dict, got {value!r}")
    names = [field.name for field in fields(cls)]
    for key in value:
        if key not in names:
            raise ValueError(f"{name} has no field {key!r}; it has {', '.join(names)}")
    return dict(value)


def check_positive_integer(name: str, value: Any) -> None:
    """Raises ValueError, naming the setting and its value, unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")

"""Readers for single fields of a Hugging Face `config.json`; an error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class UnsupportedConfigError(ValueError):
    """A checkpoint's configuration asks for something that this engine does not compute."""


def size(values: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise UnsupportedConfigError(f"config.json must set {name} to {wanted}, got {value!r}")
    return value


def token(values: Mapping[str, Any], name: str, vocab_size: int) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise UnsupportedConfigError(f"config.json must set {name} to a token of the vocabulary, got {value!r}")
    return value


def positive(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedConfigError(f"config.json must set {name} to a positive number, got {value!r}")
    return float(value)


def flag(values: Mapping[str, Any], name: str) -> bool:
    """Read a Boolean field; False if it is absent."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedConfigError(f"config.json must set {name} to true or false, got {value!r}")
    return bool(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids of `eos_token_id`, which may be absent, one id or a list."""
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise UnsupportedConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return ids


def is_active(value: Any) -> bool:
    """Whether a field has a value other than null, false or empty."""
    return value is not None and value is not False and value != [] and value != {} and value != ""

"""Unknown fields of a `config.json`: refused by name, or listed in one warning."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, TypedDict

from jaxinfer.models.config_fields import UnsupportedConfigError, is_active
from jaxinfer.models.families import Family
from jaxinfer.models.field_rule import Verdict, is_known_type, verdict

logger = logging.getLogger(__name__)

_IGNORED_ON_REQUEST = "ignore_config_fields names it"


class ConfigOptions(TypedDict, total=False):
    """Keyword arguments of every function that reads a model's configuration.

    Attributes:
        ignore_config_fields: names of fields to ignore, which the caller knows to change no output. A name that the
            file does not have is allowed; one that the family reads is an error.
        strict_config: refuse every unknown field, even one that the reference does not read.
    """

    ignore_config_fields: Collection[str]
    strict_config: bool


def accepted_fields(
    hf: Mapping[str, Any], family: Family, *, ignore_config_fields: Collection[str] = (), strict_config: bool = False
) -> dict[str, Any]:
    """Return the fields of a model's `config.json` without the unknown ones that may be ignored.

    One warning names the ignored fields.

    Args:
        ignore_config_fields, strict_config: see `ConfigOptions`.

    Raises:
        UnsupportedConfigError: unknown fields may change the model's output, or `ignore_config_fields` names a field
            that the family reads; the message names it and the remedy.
        ValueError: `ignore_config_fields` is a single string.
    """

    def judge(name: str) -> Verdict:
        if name == "auto_map" and is_known_type(family.model_type):
            return Verdict(0, False, "code that comes with a checkpoint is never run")
        return verdict(family.model_type, name)

    return sifted(
        hf, family.architecture, read=family.read_fields, known=family.known_fields, judge=judge,
        ignore_config_fields=ignore_config_fields, strict_config=strict_config,
    )  # fmt: skip


def sifted(
    hf: Mapping[str, Any],
    owner: str,
    *,
    read: Set[str],
    known: Set[str],
    judge: Callable[[str], Verdict],
    ignore_config_fields: Collection[str] = (),
    strict_config: bool = False,
) -> dict[str, Any]:
    """Return the fields that are known or inactive; see `accepted_fields`.

    Args:
        owner: the architecture, for messages.
        read: fields that are used, which cannot be ignored.
        known: fields that are used or change no output.
        judge: returns the verdict on an active field that is not known.
    """
    if isinstance(ignore_config_fields, str):
        raise ValueError(f"ignore_config_fields must be a list of names, got the string {ignore_config_fields!r}")
    needed = sorted(read & set(ignore_config_fields))
    if needed:
        raise UnsupportedConfigError(
            f"ignore_config_fields names {', '.join(needed)}, which {owner} reads; only fields that it does not know "
            "can be ignored"
        )
    refused: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for name, value in hf.items():
        if name in known or not is_active(value):
            continue
        if name in ignore_config_fields:
            ignored[name] = _IGNORED_ON_REQUEST
            continue
        found = judge(name)
        if found.refuses or strict_config:
            refused[name] = found.reason if found.refuses else "strict_config refuses unknown fields"
        else:
            ignored[name] = found.reason
    if refused:
        raise UnsupportedConfigError(
            f"config.json sets {_listed(hf, refused)}, which {owner} here does not know; if the model's output does "
            f"not depend on {'it' if len(refused) == 1 else 'them'}, remove the field or pass "
            f"ignore_config_fields={list(refused)} ({' '.join(f'--ignore-config-field {name}' for name in refused)})"
        )
    if ignored:
        logger.warning("%s ignores fields of config.json: %s", owner, _listed(hf, ignored))
    return {name: value for name, value in hf.items() if name not in ignored}


def _listed(hf: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={reprlib.repr(hf[name])} ({reason})" for name, reason in reasons.items())

"""Options for unknown fields of a model's `config.json`; imports no JAX."""

from __future__ import annotations

import argparse
from typing import Any


def add_config_field_options(parser: Any) -> None:
    """Add --ignore-config-field and --strict-config to a parser or a group of one."""
    parser.add_argument(
        "--ignore-config-field",
        action="append",
        metavar="NAME",
        help="ignore an unknown field of config.json, which you know to change no output; repeatable",
    )
    parser.add_argument("--strict-config", action="store_true", help="refuse all unknown fields of config.json")


def config_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options as keyword arguments of functions that read a configuration."""
    given: dict[str, Any] = {}
    if args.ignore_config_field:
        given["ignore_config_fields"] = tuple(args.ignore_config_field)
    if args.strict_config:
        given["strict_config"] = True
    return given

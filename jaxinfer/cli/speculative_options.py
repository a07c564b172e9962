"""The options of verbs that may speculate; imports no JAX."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.strategies.draft_methods import METHODS

_OR_OF_MODELS = " or ".join(row.name for row in METHODS.values() if row.model is not None)


def add_speculative_options(parser: Any, *, default_draft_model: str | None = None) -> None:
    """Give a parser, or a group of one, --speculative and --draft-model.

    Args:
        default_draft_model: in words, if there is one.
    """
    parser.add_argument(
        "--speculative",
        choices=METHODS,
        metavar="METHOD",
        help=f"draft tokens, which changes none: {' or '.join(METHODS)}",
    )
    default = "" if default_draft_model is None else f" (default: {default_draft_model})"
    parser.add_argument(
        "--draft-model",
        metavar="PATH",
        help=f"the model of --speculative {_OR_OF_MODELS}: checkpoint directory or hub id{default}",
    )


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """The fields of the speculative configuration that options ask for; None: no speculation.

    Raises:
        ValueError: options that do not go together.
    """
    if args.draft_model is not None and (args.speculative is None or METHODS[args.speculative].model is None):
        raise ValueError(f"--draft-model goes with --speculative {_OR_OF_MODELS}")
    return None if args.speculative is None else {"method": args.speculative, "model": args.draft_model}

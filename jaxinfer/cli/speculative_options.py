"""The options of verbs that may speculate; imports no JAX."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.limits import SPECULATIVE_METHODS


def add_speculative_options(parser: Any, *, default_draft_model: str | None = None) -> None:
    """Give a parser, or a group of one, --speculative and --draft-model.

    Args:
        default_draft_model: in words, if there is one.
    """
    parser.add_argument(
        "--speculative",
        choices=SPECULATIVE_METHODS,
        metavar="METHOD",
        help=f"draft tokens, which changes none: {' or '.join(SPECULATIVE_METHODS)}",
    )
    default = "" if default_draft_model is None else f" (default: {default_draft_model})"
    parser.add_argument(
        "--draft-model",
        metavar="PATH",
        help=f"of --speculative draft_model, or the head of eagle3: checkpoint directory or hub id{default}",
    )


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """The fields of the speculative configuration that options ask for; None: no speculation.

    Raises:
        ValueError: options that do not go together.
    """
    if args.draft_model is not None and args.speculative not in ("draft_model", "eagle3"):
        raise ValueError("--draft-model goes with --speculative draft_model or eagle3")
    return None if args.speculative is None else {"method": args.speculative, "model": args.draft_model}

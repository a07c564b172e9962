"""Options for speculative decoding; imports no JAX."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.strategies.draft_methods import METHODS

_OR_OF_MODELS = " or ".join(row.name for row in METHODS.values() if row.model is not None)


def add_speculative_options(parser: Any, *, default_draft_model: str | None = None) -> None:
    """Add --speculative and --draft-model to a parser or a group of one.

    Args:
        default_draft_model: description of the default for the help text, if there is one.
    """
    parser.add_argument(
        "--speculative",
        choices=METHODS,
        metavar="METHOD",
        help="speculative decoding, which changes no token: "
        + "; ".join(f"{row.name}: {row.summary}" for row in METHODS.values()),
    )
    default = "" if default_draft_model is None else f" (default: {default_draft_model})"
    parser.add_argument(
        "--draft-model",
        metavar="PATH",
        help=f"the model of --speculative {_OR_OF_MODELS}: checkpoint directory or hub id{default}",
    )


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the fields of the speculative configuration that the options give; None: no speculation.

    Raises:
        ValueError: the options do not fit together.
    """
    if args.draft_model is not None and (args.speculative is None or METHODS[args.speculative].model is None):
        raise ValueError(f"--draft-model goes with --speculative {_OR_OF_MODELS}")
    return None if args.speculative is None else {"method": args.speculative, "model": args.draft_model}

"""Options of the command line that hold an output to a grammar."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_structured_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, of which one may be given."""
    group = parser.add_argument_group("structured output (one of)")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", type=Path, metavar="FILE", help="write JSON that this schema allows")
    kinds.add_argument("--regex", metavar="R", help="write what this regular expression matches, as a whole")
    kinds.add_argument("--choice", nargs="+", metavar="TEXT", help="write one of these texts (give prompts before it)")
    kinds.add_argument("--grammar", type=Path, metavar="FILE", help="write what this grammar in Lark's syntax accepts")


def structured_outputs(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the arguments of `StructuredOutputsParams` that the options ask for; None if they ask for nothing.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not text in UTF-8.
    """
    if args.json_schema is not None:
        return {"json": _text_of(args.json_schema)}
    if args.grammar is not None:
        return {"grammar": _text_of(args.grammar)}
    if args.regex is not None:
        return {"regex": args.regex}
    return None if args.choice is None else {"choice": args.choice}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error

"""Measure on held-out prompts what the embedded draft model's proposals are worth to the embedded target."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxinfer.checkpoint.directory import EMBEDDED_DRAFT, embedded_checkpoint
from training.acceptance import CASES, measure
from training.draft_card import kind_rows, missed, summary_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=embedded_checkpoint())
    parser.add_argument("--draft", type=Path, default=embedded_checkpoint(EMBEDDED_DRAFT))
    parser.add_argument("--cases", type=int, default=CASES, help="held-out prompts")
    options = parser.parse_args()
    figures = measure(options.target, options.draft, options.cases)
    print("| temperature | tokens | same noise | most likely | min(1, p/q) | in chains |")
    print("\n".join(summary_rows(figures)))
    print("| kind | tokens | temperature 0 | in chains | temperature 0.8 | in chains |")
    print("\n".join(kind_rows(figures)))
    failures = missed(figures)
    for each in failures:
        print(f"MISSED: {each}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

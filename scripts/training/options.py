"""The command line that the scripts of models made from a trained one share."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from jaxinfer.checkpoint.directory import embedded_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent


def parser_of(
    description: str | None, base: str, name: str, documents: int, steps: int | None = None
) -> argparse.ArgumentParser:
    """A parser of what all of them ask. `base` names the option of the model that they begin from, `name` the
    checkpoint that is made."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(f"--{base}", type=Path, default=embedded_checkpoint(), help="the trained model")
    parser.add_argument("--output", type=Path, default=ROOT / "checkpoints" / name)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / name,
        help="where intermediate files go; the trained model's answers are used again, if they are there",
    )  # fmt: skip
    parser.add_argument("--documents", type=int, default=documents, help="texts to learn from")
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps)
    return parser


def empty_source(work: Path) -> Path:
    """Where the checkpoint is written before it is converted; `work` exists afterwards."""
    source = work / "huggingface"
    if source.exists():
        shutil.rmtree(source)
    work.mkdir(parents=True, exist_ok=True)
    return source

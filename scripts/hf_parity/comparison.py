"""What transformers computes from a checkpoint, run in the parity environment, and how this engine's tokens compare."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REFERENCE = Path(__file__).with_name("reference.py")
DEFAULT_PYTHON = Path(__file__).resolve().parents[2] / ".venv-parity" / "bin" / "python"


@dataclass(frozen=True)
class Reference:
    """What transformers computed: logits [T, V] of each prompt, greedy tokens and their margins [prompts, steps]."""

    logits: list[np.ndarray]
    greedy: list[list[int]]
    margins: np.ndarray


@dataclass(frozen=True)
class Comparison:
    """One prompt's continuation, ours and theirs.

    Attributes:
        equal: tokens before the first difference.
        margin: between transformers' best and second logit where they part; its smallest one if they never do.
    """

    prompt_length: int
    length: int
    equal: int
    margin: float

    def verdict(self, near_tie: float) -> str:
        """ "equal", "near tie" (rounding decides such a token in any implementation) or "DIFFERENT"."""
        if self.equal == self.length:
            return "equal"
        return "near tie" if self.margin < near_tie else "DIFFERENT"


def ask_transformers(
    python: Path, directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int, make: dict[str, Any] | None = None
) -> Reference:
    """Run `reference.py` in the parity environment.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"directory": str(directory), "make": make, "prompts": [list(prompt) for prompt in prompts],
               "new_tokens": new_tokens, "output": f"{folder}/result.npz"}  # fmt: skip
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job))
        done = subprocess.run([python, REFERENCE, file], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{REFERENCE.name} failed in {python}:\n{done.stderr}")
        with np.load(job["output"]) as result:
            logits = [result[f"logits_{number}"] for number in range(len(prompts))]
            return Reference(logits, result["greedy"].tolist(), result["margins"])


def compare(prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Reference) -> list[Comparison]:
    """Prompt by prompt, up to the first different token."""
    found = []
    for prompt, mine, other, margins in zip(prompts, ours, theirs.greedy, theirs.margins, strict=True):
        equal = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(other))
        margin = margins[equal] if equal < len(other) else margins.min()
        found.append(Comparison(len(prompt), len(other), equal, float(margin)))
    return found

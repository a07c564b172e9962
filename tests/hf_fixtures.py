"""The committed checkpoints under tests/fixtures/hf, and what Hugging Face's implementations computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "fixtures" / "hf"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))


@dataclass(frozen=True)
class Expected:
    """Prompts and what they gave: logits after each prompt, all logits of the longest, greedy continuations."""

    prompts: list[list[int]]
    last_logits: np.ndarray  # [prompts, V]
    longest_logits: np.ndarray  # [T, V]
    greedy: list[list[int]]
    smallest_margin: float


def checkpoint_path(name: str) -> Path:
    """The Hugging Face directory of a fixture."""
    return FOLDER / name


def expected(name: str) -> Expected:
    """What transformers computed from a fixture."""
    with np.load(FOLDER / name / "expected.npz") as stored:
        ends = np.cumsum(stored["prompt_lengths"])
        return Expected(
            prompts=[part.tolist() for part in np.split(stored["prompts"], ends[:-1])],
            last_logits=stored["last_logits"],
            longest_logits=stored["longest_logits"],
            greedy=stored["greedy"].tolist(),
            smallest_margin=float(stored["smallest_margin"]),
        )

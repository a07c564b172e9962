"""The committed checkpoints under tests/fixtures/hf, and what Hugging Face's implementations computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "fixtures" / "hf"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))
# Of models whose torch code comes with their checkpoints.
REMOTE = FOLDER.with_name("hf_remote")
REMOTE_NAMES = tuple(sorted(path.name for path in REMOTE.iterdir() if path.is_dir()))


@dataclass(frozen=True)
class Expected:
    """Prompts and what they gave: logits after each prompt, all logits of the longest, greedy continuations."""

    prompts: list[list[int]]
    last_logits: np.ndarray  # [prompts, V]
    longest_logits: np.ndarray  # [T, V]
    greedy: list[list[int]]  # none of a diffusion model
    smallest_margin: float


def checkpoint_path(name: str) -> Path:
    """The Hugging Face directory of a fixture."""
    return (REMOTE if name in REMOTE_NAMES else FOLDER) / name


def expected(name: str) -> Expected:
    """What transformers computed from a fixture."""
    with np.load(checkpoint_path(name) / "expected.npz") as stored:
        ends = np.cumsum(stored["prompt_lengths"])
        return Expected(
            prompts=[part.tolist() for part in np.split(stored["prompts"], ends[:-1])],
            last_logits=stored["last_logits"],
            longest_logits=stored["longest_logits"],
            greedy=stored["greedy"].tolist() if "greedy" in stored else [],
            smallest_margin=float(stored["smallest_margin"]) if "smallest_margin" in stored else 0.0,
        )

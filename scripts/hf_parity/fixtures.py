"""What the scripts share that record fixtures: prompts, the file of results, and the search for a clear seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NEW_TOKENS = 32
SMALLEST_MARGIN = 1e-3  # between the best and the second logit, at every greedy step
SMALLEST_ROUTER_GAP = 1e-4  # between the scores of the last expert chosen and of the first one not, for every token


def prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids, one prompt of each length."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def write_expected(directory: Path, asked: list[list[int]], logits: list[np.ndarray], **more: Any) -> None:
    """What was computed, beside its checkpoint: logits after each prompt and all of the last prompt, and `more`."""
    np.savez_compressed(
        directory / "expected.npz",
        prompts=np.concatenate(asked).astype(np.int32),
        prompt_lengths=np.asarray([len(prompt) for prompt in asked], np.int32),
        last_logits=np.stack([of_prompt[-1] for of_prompt in logits]),
        longest_logits=logits[-1],
        **more,
    )


def describe(directory: Path, seed: int) -> str:
    """The seed of a fixture and how clear its choices are."""
    with np.load(directory / "expected.npz") as stored:
        numbers = [f"{name} {float(stored[name]):.5f}" for name in stored if name.startswith("smallest")]
    return ", ".join([f"seed {seed}", *numbers])


def first_seed(make: Callable[[int], bool]) -> int:
    """The first seed for which `make` writes a fixture whose every choice is clear."""
    for seed in range(300):
        if make(seed):
            return seed
    raise RuntimeError("no seed gives choices that are clear enough")

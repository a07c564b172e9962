"""Workloads: requests with random or given prompts, and their arrival times."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LengthRange:
    """A uniform range of lengths in tokens, from `shortest` to `longest`, both included.

    Raises:
        ValueError: not 1 <= shortest <= longest.
    """

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"a range of lengths must have 1 <= MIN <= MAX, got {self}")

    def __str__(self) -> str:
        return f"{self.shortest}:{self.longest}"

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Parse "MIN:MAX", or "N" for equal lengths.

        Raises:
            ValueError: the text is neither.
        """
        numbers = text.split(":")
        if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() for number in numbers):
            raise ValueError(f"a range of lengths is written MIN:MAX or N, got {text!r}")
        return cls(int(numbers[0]), int(numbers[-1]))

    def scaled(self, factor: float) -> LengthRange:
        """Return the range with both ends multiplied by `factor`, rounded down, at least 1."""
        return LengthRange(max(1, int(self.shortest * factor)), max(1, int(self.longest * factor)))


@dataclass(frozen=True)
class WorkItem:
    """One request: a prompt as `LLM.generate` takes it, and the most tokens to generate."""

    prompt: str | dict[str, Any]
    max_tokens: int


def random_workload(
    *, num_requests: int, input_len: LengthRange, output_len: LengthRange, vocab_size: int, seed: int
) -> list[WorkItem]:
    """Make requests with uniformly random tokens and lengths; equal arguments give equal requests.

    Raises:
        ValueError: `num_requests` or `vocab_size` is below 1.
    """
    for name, value in (("num_requests", num_requests), ("vocab_size", vocab_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    rng = np.random.default_rng(seed)
    inputs = rng.integers(input_len.shortest, input_len.longest, num_requests, endpoint=True)
    outputs = rng.integers(output_len.shortest, output_len.longest, num_requests, endpoint=True)
    return [
        WorkItem({"prompt_token_ids": rng.integers(0, vocab_size, int(length)).tolist()}, int(max_tokens))
        for length, max_tokens in zip(inputs, outputs, strict=True)
    ]


def fitting_scale(input_len: LengthRange, output_len: LengthRange, max_model_len: int) -> float:
    """Return the largest factor, at most 1, at which the longest prompt and output fit into `max_model_len`.

    Raises:
        ValueError: not even one token of prompt and one of output fit.
    """
    if max_model_len < 2:
        raise ValueError(f"max_model_len={max_model_len} has no room for a prompt and an output")
    longest = input_len.longest + output_len.longest
    return min(1.0, max_model_len / longest)


def read_workload(file: str | os.PathLike[str]) -> list[WorkItem]:
    """Read requests from a file of JSON lines: {"prompt": TEXT or "prompt_token_ids": [...], "max_tokens": N}.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not such an object (the message has its number), or there is none.
    """
    items = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                items.append(_work_item(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"line {number} of {file}: {error}") from error
    if not items:
        raise ValueError(f"{file} holds no requests")
    return items


def _work_item(entry: Any) -> WorkItem:
    if not isinstance(entry, Mapping):
        raise ValueError(f"must be an object, got {entry!r}")
    unknown = entry.keys() - {"prompt", "prompt_token_ids", "max_tokens"}
    if unknown:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
    if ("prompt" in entry) == ("prompt_token_ids" in entry):
        raise ValueError("must have one of prompt and prompt_token_ids")
    max_tokens = entry.get("max_tokens")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(f"max_tokens must be an integer of at least 1, got {max_tokens!r}")
    if "prompt" not in entry:
        return WorkItem({"prompt_token_ids": entry["prompt_token_ids"]}, max_tokens)
    if not isinstance(entry["prompt"], str):
        raise ValueError(f"prompt must be a string, got {entry['prompt']!r}")
    return WorkItem(entry["prompt"], max_tokens)


def poisson_arrivals(*, num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Draw arrival times in seconds after the start, by a Poisson process of `request_rate` requests per second.

    Raises:
        ValueError: `request_rate` is not positive.
    """
    if not request_rate > 0:
        raise ValueError(f"request_rate must be above 0, got {request_rate}")
    gaps = np.random.default_rng([seed, 1]).exponential(1 / request_rate, num_requests)
    return np.cumsum(gaps).tolist()

"""The requests of a measurement, the same over HTTP and without."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("the", "lamp", "of", "a", "harbour", "boat", "keeper", "plan", "bicycle", "drum", "garden", "story", "bread")
# The engine of both sides.
ENGINE: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_cache_tokens": 32768}


def messages(number: int) -> list[dict[str, str]]:
    rng = random.Random(number)
    return [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 60)))}]


def params(number: int, max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": number, "max_tokens": max_tokens, "ignore_eos": True}

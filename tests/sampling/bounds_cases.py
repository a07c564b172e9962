"""The bounds of draws (biases, bans, penalties) as cases of the reference, and as entries of seats."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from jaxinfer.sampling.bounds import Bounds, packed_bits

VOCAB = 40  # no multiple of 32
BANNED = -np.inf
PROMPT, OUTPUT = [1, 2, 3, 3, 8], [3, 5, 5, 5, 9]

CASES: dict[str, dict] = {
    "nothing": {},
    "presence": {"output": OUTPUT, "presence": 0.7},
    "negative_presence": {"output": OUTPUT, "presence": -1.3},
    "frequency": {"output": OUTPUT, "frequency": 0.4},
    "repetition": {"prompt": PROMPT, "output": OUTPUT, "repetition": 1.6},
    "repetition_below_one": {"prompt": PROMPT, "output": OUTPUT, "repetition": 0.5},
    "all_penalties": {"prompt": PROMPT, "output": OUTPUT, "presence": 0.3, "frequency": -0.9, "repetition": 1.2},
    "allowed": {"allowed": [5, 8, 30]},
    "biases": {"biases": {5: 2.0, 6: -100.0, 39: 0.5}},
    "bans": {"biases": {5: -np.inf, 0: -np.inf}},
    "biases_of_forbidden_tokens": {"allowed": [5, 8], "biases": {5: 2.0, 6: 100.0}},
    "penalties_after_biases": {"prompt": PROMPT, "output": OUTPUT, "biases": {5: 4.0, 9: -4.0}, "repetition": 2.0},
    "everything": {
        "prompt": PROMPT,
        "output": OUTPUT,
        "allowed": [1, 3, 5, 7, 9],
        "biases": {3: -np.inf, 7: 1.5, 9: -2.0},
        "presence": 0.5,
        "frequency": 0.25,
        "repetition": 1.3,
    },
    "ending": {"biases": dict.fromkeys((4, 33, 39), -np.inf)},
}


def bits_of(tokens: Any, vocab: int = VOCAB) -> np.ndarray:
    flags = np.zeros(vocab, bool)
    flags[list(tokens)] = True
    return packed_bits(flags)


def nobody(num_seats: int, vocab: int = VOCAB) -> Bounds:
    arrays = {name: np.zeros(extent, dtype) for name, (extent, dtype) in Bounds.layout(num_seats, vocab).items()}
    arrays["allowed"][:] = bits_of(range(vocab), vocab)
    arrays["repetition_penalty"][:], arrays["bias_token"][:] = 1, vocab
    return Bounds(**arrays)


def enter(bounds: Bounds, seat: int, case: dict, *, outputs: list[int] | None = None, as_ending: bool = False) -> None:
    """A case for a seat, as it is when `outputs` are counted."""
    vocab = bounds.counts.shape[1]
    biases = {token: bias for token, bias in case.get("biases", {}).items() if bias != BANNED}
    banned = {token for token, bias in case.get("biases", {}).items() if bias == BANNED}
    allowed = case.get("allowed")
    bounds.binds[seat] = 1
    if as_ending:
        bounds.ending[seat], bounds.min_length[seat], banned = bits_of(banned, vocab), 10, set()
    bounds.allowed[seat] = bits_of(set(range(vocab) if allowed is None else allowed) - banned, vocab)
    bounds.bias_token[seat, : len(biases)], bounds.bias[seat, : len(biases)] = list(biases), list(biases.values())
    bounds.in_prompt[seat] = bits_of(case.get("prompt", ()), vocab) if "repetition" in case else 0
    bounds.prompt_length[seat] = len(PROMPT)
    for token, count in Counter(outputs or ()).items():
        bounds.counts[seat, token] = count
    for name in ("presence", "frequency", "repetition"):
        if name in case:
            getattr(bounds, f"{name}_penalty")[seat] = case[name]


def random_logits(rows: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (rows, VOCAB)).astype(np.float32)

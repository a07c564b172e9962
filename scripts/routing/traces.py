"""Traces of chats with shared beginnings: many sessions over few system prompts, turn after turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxinfer.cache.radix_node import page_key

_VOCABULARY = 150_000


@dataclass(frozen=True)
class Workload:
    """Distributions of a trace.

    Attributes:
        num_systems: system prompts, of which the k-th is used in proportion to 1 / k.
        system_tokens: their least and greatest length.
        mean_turns: of a session, geometric.
        user_tokens, answer_tokens: least and greatest length of a turn's question and answer.
        think_seconds: mean wait between an answer and the next question, exponential.
    """

    num_systems: int = 200
    system_tokens: tuple[int, int] = (500, 4000)
    mean_turns: float = 4.0
    user_tokens: tuple[int, int] = (20, 400)
    answer_tokens: tuple[int, int] = (50, 500)
    think_seconds: float = 20.0


@dataclass
class Session:
    """A chat.

    Attributes:
        number: of the session.
        turns: (question, answer), as the keys of their tokens, that have not been asked yet; the last comes first.
        known: the key of the tokens so far, system prompt included.
    """

    number: int
    turns: list[tuple[bytes, bytes]]
    known: bytes


def sessions(workload: Workload, seed: int) -> Iterator[Session]:
    """Yield sessions without end, the same for the same seed."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, workload.num_systems + 1)
    systems = [_tokens(rng, workload.system_tokens) for _ in range(workload.num_systems)]
    number = 0
    while True:
        system = systems[rng.choice(workload.num_systems, p=shares / shares.sum())]
        turns = [
            (_tokens(rng, workload.user_tokens), _tokens(rng, workload.answer_tokens))
            for _ in range(rng.geometric(1 / workload.mean_turns))
        ]
        yield Session(number, turns, system)
        number += 1


def _tokens(rng: np.random.Generator, length: tuple[int, int]) -> bytes:
    return page_key(rng.integers(0, _VOCABULARY, rng.integers(length[0], length[1] + 1)).tolist())

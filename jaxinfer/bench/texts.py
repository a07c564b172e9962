"""Workloads of text, for servers whose tokens are not known: lengths are counted in short words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.bench.workload import LengthRange, WorkItem

# Short and frequent, so that most are one token in most vocabularies.
WORDS = (
    "a", "and", "as", "at", "ball", "bird", "blue", "boat", "book", "box", "but", "by", "cat", "cup", "day", "dog",
    "door", "for", "from", "green", "hand", "hat", "he", "her", "his", "house", "in", "is", "it", "lamp", "light",
    "man", "my", "new", "not", "of", "old", "on", "or", "out", "red", "road", "sea", "she", "so", "sun", "that",
    "the", "they", "to", "tree", "up", "was", "water", "we", "wind", "with", "you",
)  # fmt: skip


def random_texts(num_requests: int, input_len: LengthRange, output_len: LengthRange, seed: int) -> list[WorkItem]:
    """Make prompts of random words that share nothing."""
    return _texts(num_requests, input_len, output_len, seed, shared=0.0)


def shared_prefixes(num_requests: int, input_len: LengthRange, output_len: LengthRange, seed: int) -> list[WorkItem]:
    """Make prompts of random words whose first half is the same in all."""
    return _texts(num_requests, input_len, output_len, seed, shared=0.5)


def _texts(
    num_requests: int, input_len: LengthRange, output_len: LengthRange, seed: int, *, shared: float
) -> list[WorkItem]:
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    rng = np.random.default_rng(seed)
    prefix = rng.choice(WORDS, int(input_len.longest * shared)).tolist()
    items = []
    for _ in range(num_requests):
        length = int(rng.integers(input_len.shortest, input_len.longest, endpoint=True))
        begun = prefix[: int(length * shared)]
        text = " ".join([*begun, *rng.choice(WORDS, length - len(begun)).tolist()])
        items.append(WorkItem(text, int(rng.integers(output_len.shortest, output_len.longest, endpoint=True))))
    return items


# By the names on the command line. Equal arguments give equal requests.
TEXT_WORKLOADS: dict[str, Callable[[int, LengthRange, LengthRange, int], list[WorkItem]]] = {
    "random": random_texts,
    "shared-prefix": shared_prefixes,
}

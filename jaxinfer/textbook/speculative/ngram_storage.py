"""N-gram statistics of a growing text: which token followed its last few tokens most often."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np


class INgramStorage(ABC):
    """Counts of the tokens that have followed contexts of up to n - 1 tokens, updated during use.

    Args:
        n: length of the n-grams, context and next token together; at least 2.
        vocab_size: V; token ids are in [0, V).
    """

    def __init__(self, n: int, vocab_size: int) -> None:
        if not (isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 2):
            raise ValueError(f"n must be an integer of at least 2, got {n!r}")
        if not vocab_size >= 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size!r}")
        self.n, self.vocab_size = int(n), int(vocab_size)

    @abstractmethod
    def levels(self) -> Sequence[GramLevel]:
        """Return the tables, that of the longest context first."""

    def next_token(self, input_ids: Sequence[int]) -> int | None:
        """Return the most frequent token after the longest known context at the end of `input_ids`; None: unknown."""
        for level in self.levels():
            token = level.best(input_ids)
            if token is not None:
                return token
        return None

    def has_gram(self, ngram: Sequence[int]) -> bool:
        """Whether the last of these tokens has ever followed the ones before it (on any level)."""
        return len(ngram) > 0 and any(level.count(ngram[:-1], ngram[-1]) for level in self.levels())

    def update(self, input_ids: Sequence[int], next_tokens: Iterable[int]) -> None:
        """Count each of `next_tokens` once as a token that follows `input_ids`.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """
        tokens = [int(token) for token in next_tokens]
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"next_tokens must be in [0, {self.vocab_size}), got {token}")
        for level in self.levels():
            for token in tokens:
                level.add(input_ids, token)

    def initialize(self, input_ids: Sequence[int]) -> None:
        """Count all n-grams of a text, in addition to earlier counts."""
        for end in range(1, len(input_ids)):
            self.update(input_ids[max(0, end - self.n + 1) : end], [input_ids[end]])

    def reset(self) -> None:
        """Clear all counts."""
        for level in self.levels():
            level.clear()


class OneLevelNGramStorage(INgramStorage):
    """Storage with contexts of exactly n - 1 tokens."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(n, vocab_size)
        self._level = GramLevel(self.n - 1)

    def levels(self) -> Sequence[GramLevel]:
        return (self._level,)


class NGramStorage(INgramStorage):
    """Storage with contexts of n - 1, n - 2, ..., 1 tokens: the longest known one decides."""

    def __init__(self, n: int, vocab_size: int) -> None:
        super().__init__(n, vocab_size)
        self._levels = tuple(GramLevel(length) for length in range(self.n - 1, 0, -1))

    def levels(self) -> Sequence[GramLevel]:
        return self._levels


class GramLevel:
    """Counts of the tokens after contexts of one length. Of equally frequent ones, the first to get there is best."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._best: dict[tuple[int, ...], int] = {}

    def best(self, input_ids: Sequence[int]) -> int | None:
        return self._best.get(self._context(input_ids))

    def count(self, input_ids: Sequence[int], token: int) -> int:
        return self._counts.get(self._context(input_ids), {}).get(int(token), 0)

    def add(self, input_ids: Sequence[int], token: int) -> None:
        if len(input_ids) < self.length:
            return
        context = self._context(input_ids)
        counts = self._counts.setdefault(context, {})
        counts[token] = counts.get(token, 0) + 1
        if counts[token] > counts.get(self._best.get(context, -1), 0):
            self._best[context] = token

    def clear(self) -> None:
        self._counts.clear()
        self._best.clear()

    def _context(self, input_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the last `length` tokens; fewer if there are not enough, but no token is counted after those."""
        return tuple(int(token) for token in input_ids[max(0, len(input_ids) - self.length) :])

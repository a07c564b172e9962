"""What the functions for scripts ask of a model, and a reader that knows what the model's cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class LanguageModel(Protocol):
    """Token ids to logits, with a cache of fixed size that a caller hands in and gets back.

    `CachedDecoder` makes one of any converted model; a table of logits is one too.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        ...

    @property
    def max_len(self) -> int:
        """The most tokens of a sequence."""
        ...

    def init_cache(self, max_len: int, prompt_len: int) -> Any:
        """A cache for sequences of up to `max_len` tokens, of which the first `prompt_len` are the prompt.

        The prompt's length matters to rotary embeddings that depend on a sequence's length; others pass over it.
        """
        ...

    def forward(self, cache: Any, token_ids: np.ndarray, start: int, last: int) -> tuple[np.ndarray, Any]:
        """Logits float32 [last, V] after each of the last `last` of these tokens, and the cache with them.

        Args:
            cache: holds the sequence's first `start` tokens; what it has behind them is overwritten. It is used up.
            token_ids: int32 [T], the tokens at start, ..., start + T - 1.
            start: how many tokens come before them.
            last: from 1 to T.
        """
        ...


class Reader:
    """Logits after any tokens of one sequence, computing only what the cache does not hold yet.

    The cache's length is an integer, and nothing is ever cut from the cache: tokens that turned out wrong are beyond
    the length, and are overwritten. How much still holds is what the new tokens have in common with those read before.
    So a drafter whose proposals were all accepted reads two tokens in the next round, the last draft and the bonus.

    Args:
        model: what computes the logits.
        max_len: the most tokens that will be read.
        prompt_len: how many of them are the prompt.
        use_cache: False computes everything anew every time.
    """

    def __init__(self, model: LanguageModel, max_len: int, prompt_len: int, *, use_cache: bool = True) -> None:
        self.max_len = min(max_len, model.max_len)
        self.vocab_size = model.vocab_size
        self._model = model
        self._use_cache = use_cache
        self._cache = model.init_cache(self.max_len, prompt_len)
        self._held: list[int] = []  # the tokens that the cache holds

    def logits(self, tokens: Sequence[int], last: int = 1) -> np.ndarray:
        """float32 [last, V]: the logits after each of the last `last` of all these tokens."""
        start = min(self._num_held(tokens), len(tokens) - last)
        new = np.asarray(tokens[start:], np.int32)
        logits, self._cache = self._model.forward(self._cache, new, start, last)
        self._held = list(tokens)
        return logits

    def _num_held(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are in the cache."""
        if not self._use_cache:
            return 0
        pairs = zip(tokens, self._held, strict=False)
        return next((i for i, (new, held) in enumerate(pairs) if new != held), min(len(tokens), len(self._held)))

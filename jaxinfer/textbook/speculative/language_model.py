"""The interface of models for scripts, and a reader that tracks what a model's cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class LanguageModel(Protocol):
    """A function from token ids to logits, with a cache of fixed size that a caller passes in and gets back.

    `CachedDecoder` wraps any converted model; a table of logits can be one too.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        ...

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        ...

    def init_cache(self, max_len: int, prompt_len: int) -> Any:
        """Return a cache for sequences of up to `max_len` tokens, of which the first `prompt_len` are the prompt.

        Rotary embeddings that depend on a sequence's length use the prompt's length; others ignore it.
        """
        ...

    def forward(self, cache: Any, token_ids: np.ndarray, start: int, last: int) -> tuple[np.ndarray, Any]:
        """Return logits float32 [last, V] after each of the last `last` of these tokens, and the cache with them.

        Args:
            cache: holds the sequence's first `start` tokens; entries after them are overwritten. It is used up.
            token_ids: int32 [T], the tokens at start, ..., start + T - 1.
            start: number of tokens before them.
            last: from 1 to T.
        """
        ...


class Reader:
    """Reader of logits after any tokens of one sequence, which computes only tokens that the cache does not hold yet.

    The cache is never cut: rejected tokens stay in it until they are overwritten. The prefix that new tokens share with
    those read before is valid. So a drafter whose proposals were all accepted reads two tokens in the next round, the
    last draft and the bonus token.

    Args:
        model: computes the logits.
        max_len: most tokens that will be read.
        prompt_len: number of prompt tokens among them.
        use_cache: False computes everything again every time.
    """

    def __init__(self, model: LanguageModel, max_len: int, prompt_len: int, *, use_cache: bool = True) -> None:
        self.max_len = min(max_len, model.max_len)
        self.vocab_size = model.vocab_size
        self._model = model
        self._use_cache = use_cache
        self._cache = model.init_cache(self.max_len, prompt_len)
        self._held: list[int] = []  # the tokens that the cache holds

    def logits(self, tokens: Sequence[int], last: int = 1) -> np.ndarray:
        """Return logits float32 [last, V] after each of the last `last` of all these tokens."""
        start = min(self._num_held(tokens), len(tokens) - last)
        new = np.asarray(tokens[start:], np.int32)
        logits, self._cache = self._model.forward(self._cache, new, start, last)
        self._held = list(tokens)
        return logits

    def _num_held(self, tokens: Sequence[int]) -> int:
        """Return the length of the tokens' prefix that is in the cache."""
        if not self._use_cache:
            return 0
        pairs = zip(tokens, self._held, strict=False)
        return next((i for i, (new, held) in enumerate(pairs) if new != held), min(len(tokens), len(self._held)))

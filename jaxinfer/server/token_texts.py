"""Tokens as text and bytes, for log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxinfer.outputs import Logprob
from jaxinfer.tokenizer import Tokenizer

# What stands for a probability of zero in JSON, which has no infinity.
LOWEST = -9999.0


class TokenTexts:
    """Writer of log probabilities.

    Args:
        as_ids: write a token as "token_id:NUMBER", so that two tokens of one text differ.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def text(self, token: int, given: Logprob) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text = given.decoded_token
        return self._tokenizer.decode([token], skip_special_tokens=False) if text is None else text

    def num_tokens(self, prompt: Sequence[int], tokens: Sequence[int], num_characters: int) -> int:
        """How many of an answer's tokens write its first characters; special tokens have their text."""
        stream, length = self._tokenizer.stream(prompt, skip_special_tokens=False), 0
        for number, token in enumerate(tokens):
            if length >= num_characters:
                return number
            length += len(stream.append(token))
        return len(tokens)

    def of_chat(self, entry: dict[int, Logprob], top: int) -> dict[str, Any]:
        """One token of a conversation: the sampled one, and the most likely ones."""
        (token, given), *_ = entry.items()
        likely = sorted(entry.items(), key=lambda item: item[1].rank)[:top] if top else []
        return {**self._one(token, given), "top_logprobs": [self._one(other, its) for other, its in likely]}

    def _one(self, token: int, given: Logprob) -> dict[str, Any]:
        return {
            "token": self.text(token, given),
            "logprob": finite(given.logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class LogprobLists:
    """Log probabilities of one choice of a completion, in OpenAI's four lists."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0

    def lists(self, tokens: Sequence[int], entries: Sequence[dict[int, Logprob] | None]) -> dict[str, Any]:
        """The lists for further tokens.

        Args:
            entries: for each token; None where there is none.
        """
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, entries, strict=True):
            given = Logprob(LOWEST, 0) if entry is None else entry[token]
            text = self._texts.text(token, given)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if entry is None else finite(given.logprob))
            found["top_logprobs"].append(None if entry is None else self._by_text(entry))
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found

    def _by_text(self, entry: dict[int, Logprob]) -> dict[str, float]:
        """Log probabilities by text; of tokens with one text those of the first, which is the sampled one's."""
        found: dict[str, float] = {}
        for token, given in entry.items():
            found.setdefault(self._texts.text(token, given), finite(given.logprob))
        return found


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def prompt_logprobs(entries: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Log probabilities of a prompt's tokens, as vLLM gives them."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": finite(its.logprob), "rank": its.rank, "decoded_token": its.decoded_token}
            for token, its in entry.items()
        }
        for entry in entries
    ]

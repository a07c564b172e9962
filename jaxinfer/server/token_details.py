"""What answers may say of their tokens: where each comes from, with its text, and blocks as they were denoised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.outputs import CompletionOutput
from jaxinfer.tokenizer import Tokenizer, TokenStream

DETAILS = ("token_sources", "token_texts", "blocks")


@dataclass
class TokenDetails:
    """Writer of what is said of one choice's tokens, output by output.

    Args:
        skip_special_tokens: whether special tokens have no text.
        with_sources: whether sources and texts are wanted.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool
    with_sources: bool
    _stream: TokenStream | None = None
    _texts: dict[int, str] = field(default_factory=dict)

    def fields(self, prompt_token_ids: Sequence[int], part: CompletionOutput) -> dict[str, list[Any]]:
        """Return lists of what is new, by the names in DETAILS; only a diffusion model's choice has blocks.

        The text of an incomplete character comes with the token that completes it. All texts together are those of the
        choice, and where a stop string or token has ended it, they may have more at their end.
        """
        found: dict[str, list[Any]] = {}
        if self.with_sources:
            if self._stream is None:
                self._stream = self.tokenizer.stream(prompt_token_ids, skip_special_tokens=self.skip_special_tokens)
            texts = [self._stream.append(token) for token in part.token_ids]
            if part.finish_reason is not None and texts:
                texts[-1] += self._stream.finish()
            found |= {"token_sources": list(part.token_sources or ()), "token_texts": texts}
        if part.blocks:
            found["blocks"] = [
                {"first": each.first, "token_ids": each.token_ids, "texts": list(map(self._text, each.token_ids))}
                for each in part.blocks
            ]
        return found

    def _text(self, token: int | None) -> str | None:
        if token is None:
            return None
        if token not in self._texts:
            self._texts[token] = self.tokenizer.decode([token], skip_special_tokens=self.skip_special_tokens)
        return self._texts[token]

"""A checkpoint's tokenizer: text to ids, ids to text, conversations to prompts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """Hugging Face's fast tokenizer of a directory, with its chat template."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Load the tokenizer files of `directory`.

        Raises:
            ValueError: the files are damaged, or there is no fast tokenizer for them.
        """
        with _quiet_import():
            from transformers import AutoTokenizer
        try:
            self.hf = AutoTokenizer.from_pretrained(os.fspath(directory), trust_remote_code=False)
        except Exception as error:  # whatever its parsers raise, the reason is the directory
            raise ValueError(f"cannot load a tokenizer from {directory}: {error}") from error
        backend = getattr(self.hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(f"the tokenizer of {directory} is {type(self.hf).__name__}, which has no fast form")
        self.fast = backend

    @staticmethod
    def exists(directory: str | os.PathLike[str]) -> bool:
        """Whether `directory` has tokenizer files."""
        return any((Path(directory) / name).is_file() for name in TOKENIZER_FILES)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around a prompt unless switched off."""
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if not self.hf.chat_template:
            raise ValueError("the checkpoint has no chat template: use generate with a text prompt")
        arguments = {"add_generation_prompt": True, **template_arguments}
        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, **arguments)
        except Exception as error:  # templates raise jinja's errors for roles that they do not know
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return self.encode(str(text), add_special_tokens=False)  # the template has put them in

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TokenStream:
        """A decoder of tokens that arrive one by one after a prompt."""
        return TokenStream(self.fast, prompt_token_ids, skip_special_tokens)


class TokenStream:
    """Text of tokens as they arrive; what could still change (an incomplete character) is held back."""

    # Some tokenizers decode a token differently at the start of a text: a few tokens of the prompt give the context.
    CONTEXT_TOKENS = 6

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context = list(prompt_token_ids[-self.CONTEXT_TOKENS :])
        self._token_ids: list[int] = []
        self._stream = tokenizers.decoders.DecodeStream(ids=self._context, skip_special_tokens=skip_special)
        self._emitted = 0

    def append(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._emitted += len(text)
        return text

    def finish(self) -> str:
        """The rest, incomplete characters as U+FFFD."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special)
        whole = self._tokenizer.decode(self._context + self._token_ids, skip_special_tokens=self._skip_special)
        return whole[len(before) + self._emitted :]


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """transformers tells everyone who imports it without torch; its tokenizers do not need torch."""
    name = "TRANSFORMERS_VERBOSITY"
    before = os.environ.get(name)
    os.environ.setdefault(name, "error")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)

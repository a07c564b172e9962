"""A checkpoint's tokenizer: text to ids, ids to text, conversations to prompts."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.messages import ContentForms, content_forms, in_form

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# A byte in vocabularies that fall back to bytes.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Longer texts, in characters or tokens, are converted as batches of one: other threads run meanwhile.
_LONG = 2000
# Noncharacters of Unicode, which occur in no text.
_NEVER_WRITTEN = "\U0010fffe\U0010ffff\U0010fffe"


class Tokenizer:
    """Hugging Face fast tokenizer from a directory, with its chat template."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Load the tokenizer files of `directory`.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: the files are damaged, or there is no fast tokenizer for them.
        """
        if not Path(directory).is_dir():  # transformers would take a mistyped path for a hub id, and search at length
            raise FileNotFoundError(f"no tokenizer directory at {Path(directory).absolute()}")
        try:
            self.hf = _loader(Path(directory)).from_pretrained(os.fspath(directory), trust_remote_code=False)
        except Exception as error:  # whatever its parsers raise, the reason is the directory
            raise ValueError(f"cannot load a tokenizer from {directory}: {error}") from error
        backend = getattr(self.hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ValueError(f"the tokenizer of {directory} is {type(self.hf).__name__}, which has no fast form")
        self.fast = backend
        # A text is encoded whole and as it is. Set once: later changes would be seen by other threads' calls.
        self.fast.no_truncation()
        self.fast.no_padding()
        self._encoder = self.fast
        self._forms: ContentForms | None = None  # of contents that the chat template reads, once known

    @staticmethod
    def exists(directory: str | os.PathLike[str]) -> bool:
        """Whether `directory` has tokenizer files."""
        return any((Path(directory) / name).is_file() for name in TOKENIZER_FILES)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens around a prompt unless switched off.

        Raises:
            ValueError: the text has lone surrogates, which are not characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from error
        if len(text) <= _LONG:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def without(self, token_id: int) -> Tokenizer:
        """Return a tokenizer that encodes the text of this special token as plain text.

        Other tokens and texts are as before. A token that is not an added one stays as it is.
        """
        described = json.loads(self.fast.to_str())
        for token in described["added_tokens"]:
            if token["id"] == token_id:
                token["content"] = _NEVER_WRITTEN
        encoder = tokenizers.Tokenizer.from_str(json.dumps(described))
        added = self.fast.get_added_tokens_decoder()
        if any(encoder.token_to_id(token.content) != number for number, token in added.items() if number != token_id):
            return self  # the token is in the model's vocabulary too, and later added tokens would get other ids
        found = copy.copy(self)
        found._encoder = encoder
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        if len(token_ids) <= _LONG:
            return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self.fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character; empty for an id without a token."""
        piece = self.fast.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._letters is not None:
            return bytes(self._letters[letter] for letter in piece)
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.fast.get_added_tokens_decoder())

    @functools.cached_property
    def _letters(self) -> dict[str, int] | None:
        """The byte of each letter of a byte-level vocabulary; None: the vocabulary is of another kind."""
        described = json.loads(self.fast.to_str())["decoder"] or {}
        kinds = {described.get("type")} | {each.get("type") for each in described.get("decoders", ())}
        return byte_letters() if "ByteLevel" in kinds else None

    def decode_after(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of tokens that follow a prompt, equal to what `stream` gives for them."""
        stream = self.stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        pieces = [stream.append(token) for token in token_ids]
        return "".join([*pieces, stream.finish()])

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: their contents are strings, or lists of parts {"type": "text", "text": ...}.

        Raises:
            ValueError: the checkpoint has no chat template, a part is not text, or the template refuses the messages.
        """
        if not self.hf.chat_template:
            raise ValueError("the checkpoint has no chat template: use generate with a text prompt")
        arguments = {"add_generation_prompt": True, **template_arguments}

        def render(messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str:
            return str(self.hf.apply_chat_template(list(messages), tokenize=False, **given))

        forms = self._forms
        if forms is None or "chat_template" in arguments:
            # Other arguments are those of one call: what they make of the template says nothing about the next one.
            template = {name: arguments[name] for name in ("chat_template",) if name in arguments}
            forms = content_forms(lambda messages: render(messages, template))
            self._forms = forms if not template else self._forms
        messages = in_form(messages, forms)
        try:
            text = render(messages, arguments)
        except Exception as error:  # templates raise jinja's errors for roles that they do not know
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)  # the template has added them

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TokenStream:
        """Return a decoder of tokens that arrive one by one after a prompt."""
        return TokenStream(self.fast, prompt_token_ids, skip_special_tokens)


def byte_letters() -> dict[str, int]:
    """Return the letters that stand for bytes in byte-level vocabularies: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenStream:
    """Incremental decoder of tokens after a prompt; holds back text that could still change (incomplete characters).

    It gives the text of these tokens alone: they do not complete a character that the prompt leaves incomplete.
    """

    # Some tokenizers decode a token differently at the start of a text: a few tokens of the prompt give the context.
    CONTEXT_TOKENS = 6

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        context = list(prompt_token_ids[-self.CONTEXT_TOKENS :])
        while context and self._decode(context).endswith("\ufffd"):
            context.pop()
        self._context = context  # tokens whose text was returned: the pending ones are decoded after them
        self._pending: list[int] = []
        self._num_shown = 0  # characters of the pending tokens that were returned: those before an incomplete one
        self._stream = tokenizers.decoders.DecodeStream(ids=context, skip_special_tokens=skip_special)

    def append(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            # With byte fallback, one bad byte invalidates the whole run of bytes before it. Text that was returned
            # stays, and the pending tokens are decoded again.
            self._context = []
            self._stream = tokenizers.decoders.DecodeStream(skip_special_tokens=self._skip_special)
            text = self._stream.step(self._tokenizer, self._pending)
        if not text:
            complete = self._pending_text().rstrip("\ufffd")
            text, self._num_shown = complete[self._num_shown :], max(self._num_shown, len(complete))
            return text
        return self._take(text)

    def finish(self) -> str:
        """Return the rest, with incomplete characters as U+FFFD; a second call returns nothing."""
        return self._take(self._pending_text())

    def _take(self, text: str) -> str:
        """Return the part of the pending tokens' text that was not returned yet; they are no longer pending."""
        text = text[self._num_shown :]
        self._context, self._pending, self._num_shown = self._pending, [], 0
        return text

    def _pending_text(self) -> str:
        before, whole = self._decode(self._context), self._decode(self._context + self._pending)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


def _loader(directory: Path) -> Any:
    """Return the class that loads a directory's tokenizer: tokenizer.json is complete, older files need their class.

    AutoTokenizer also reads model configurations, and so imports torch where that is installed.
    """
    with _quiet_import():
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as loader
        else:
            from transformers import AutoTokenizer as loader
    return loader


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence what transformers logs when it is imported without torch: its tokenizers do not need torch."""
    name = "TRANSFORMERS_VERBOSITY"
    before = os.environ.get(name)
    os.environ.setdefault(name, "error")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
